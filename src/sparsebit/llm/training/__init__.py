"""Fine-tuning: adapters on packed models, NF4, and stages for several processes."""
