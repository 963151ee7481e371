"""Compiled code that several codecs share."""
