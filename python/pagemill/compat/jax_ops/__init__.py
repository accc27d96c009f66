"""Stand-ins for modules of ``jax.experimental.pallas.ops.tpu``."""
