"""tamiyo: the one who decides."""
