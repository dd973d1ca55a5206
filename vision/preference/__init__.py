"""Preference pairs from unlabelled images: sources, answers, selection and export."""
