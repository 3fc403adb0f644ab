"""The evaluation of SageSched, re-run in the simulator."""
