# zero_to_torch.py of DeepSpeed: left out here
