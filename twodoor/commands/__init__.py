"""The commands of `twodoor`, one module each; heavy imports happen inside the functions."""
