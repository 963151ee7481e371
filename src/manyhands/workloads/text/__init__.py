"""Text as tokens: tokenizers, files of tokens, windows over them, and masks."""
