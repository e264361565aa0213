import hypothesis
import torch

torch.set_num_threads(1)
# The same examples in every run, on machines of any speed.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same")
