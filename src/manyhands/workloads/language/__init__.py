"""Tasks of PyTorch that learn a text: `gpt` and `recurrent` predict its next byte, `bert` fills in masked ones."""
