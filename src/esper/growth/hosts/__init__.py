"""Hosts of the built-in tasks: small networks with their slots, as dotted module names, in
`slot_modules`. Any nn.Module can be a host."""
