"""Using a model: what a user names it by, questions and answers, and folders to hand on."""
