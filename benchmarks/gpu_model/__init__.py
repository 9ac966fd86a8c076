"""What train_gpt.py would launch on an H100, found on a machine without one; README.md says how."""
