"""One thread for every test: tiny models gain nothing from more, and cores are shared."""

import torch

torch.set_num_threads(1)
