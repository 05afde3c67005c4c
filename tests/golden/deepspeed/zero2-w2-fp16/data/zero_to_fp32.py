# zero_to_fp32.py of DeepSpeed: left out here
