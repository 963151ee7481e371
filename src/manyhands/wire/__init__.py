"""What is sent: gradients taken from autograd, laid out flat, cut into parcels, compressed by a codec."""
