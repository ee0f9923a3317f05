"""Speed, side by side: our simulator and PyTorch loops on the same work loads in one run."""
