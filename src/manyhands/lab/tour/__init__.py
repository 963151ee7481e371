"""The guided tour: lessons as pages of text, and what is in them."""
