"""How figures write the names of methods and solvers."""

LABELS = {
    "locoprop-m": "LocoProp-M",
    "locoprop-s": "LocoProp-S",
    "pocoprop-m": "PocoProp-M",
    "pocoprop-s": "PocoProp-S",
    "proxprop": "ProxProp",
    "exact-s": "exact LocoProp-S",
    "exact-m": "exact LocoProp-M",
    "exact-s-muon": "exact S + Muon",
    "sgd": "SGD",
    "momentum": "Momentum",
    "nesterov": "Nesterov",
    "adagrad": "Adagrad",
    "rmsprop": "RMSProp",
    "adam": "Adam",
    "kfac": "K-FAC",
    "shampoo": "Shampoo",
    "muon": "Muon",
    "soap": "SOAP",
}

DATA = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "curves": "CURVES"}


def label(method: str) -> str:
    """Return the name as people write it, with its @k."""
    base, at, every = method.partition("@")
    return f"{LABELS.get(base, base)}{at}{every}"
