"""What travels: gradients taken from autograd, laid out flat, cut into parcels, made smaller by a codec."""
