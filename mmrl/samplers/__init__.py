"""What chooses prompts, and how often each is answered."""
