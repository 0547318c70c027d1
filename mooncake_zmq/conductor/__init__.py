"""Places every request by where its KV already is. Pure."""
