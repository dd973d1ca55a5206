"""Published methods, one file per paper: title, arXiv id and formula, then the pieces that only it needs.

The registry finds a file here without any list. It may import the rest of mmrl, and never another paper.
"""
