"""The codecs, one file each; `wire.codec` lists them."""
