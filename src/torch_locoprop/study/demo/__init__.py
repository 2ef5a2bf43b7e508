"""The demo: a few methods train one small autoencoder side by side."""
