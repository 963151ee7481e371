"""One process's end of all its connections to others, which come, fall silent and die: frames, greetings, memory."""
