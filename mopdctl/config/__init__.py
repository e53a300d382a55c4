"""What users write in YAML: pydantic models that load in milliseconds, without torch."""
