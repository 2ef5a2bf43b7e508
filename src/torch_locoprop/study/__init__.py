"""The deep-autoencoder study: data, model, schedule, training, figures. Needs the extra `study`."""
