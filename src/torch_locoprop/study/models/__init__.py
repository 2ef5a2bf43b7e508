"""The autoencoders of the study: ``architectures`` by name or widths, ``autoencoder`` builds them."""
