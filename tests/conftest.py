"""One thread: on models this small more gain nothing, and where tests share the cores they lose much."""

import torch

torch.set_num_threads(1)
