"""The numbers of FP4: NVFP4, MXFP4 and the FP8 beside them, as pure functions of tensors. No configuration."""
