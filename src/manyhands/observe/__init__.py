"""What a run recorded, what that says, and how it is drawn."""
