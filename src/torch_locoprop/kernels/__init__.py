"""Fast paths. Each equals, to rounding, the plain version that it stands beside."""

from torch_locoprop.kernels import rmsprop as rmsprop
