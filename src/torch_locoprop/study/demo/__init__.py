"""The demo: four methods train one small autoencoder; ``python -m torch_locoprop.study.demo``."""
