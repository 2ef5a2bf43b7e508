"""The deep-autoencoder study: data, model, schedule, training loop and figures. Needs the extra `study`."""
