"""The sharded module: gathers a unit's weights before they are used, frees them afterwards and pushes gradients."""
