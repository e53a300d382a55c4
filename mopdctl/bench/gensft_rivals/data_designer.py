"""NeMo Data Designer in place of `gen-sft`: `python -P data_designer.py SEEDS URL MODEL ROWS FOLDER`.

Asks for one text for each of the first ROWS prompts in SEEDS (JSONL with a field `prompt`), at most 64 at once, and
leaves Parquet in FOLDER. `-P`, because this file is named like the package that it imports.

Set because it makes the run cheaper: no telemetry, no metrics endpoint, no log, no health check of the model, Jinja
without the checks for templates of strangers. Left alone because no value was cheaper: rows of a row group (1000), row
groups at once (3), tasks in flight (1024). It profiles what it made in the end, which no setting turns off.
"""

import logging
import os
import sys
from importlib import import_module

CONCURRENCY = 64
TEMPERATURE = 0.7
MAX_TOKENS = 256


def main(seeds: str, url: str, model: str, rows: str, folder: str) -> None:
    """Makes the data set."""
    os.environ["NEMO_TELEMETRY_ENABLED"] = "false"
    os.environ["DATA_DESIGNER_HOME"] = f"{folder}/home"  # where it writes its default models and providers
    os.environ["NO_PROXY"] = "127.0.0.1"
    logging.disable()
    dd = import_module("data_designer.config")
    provider = dd.ModelProvider(name="server", endpoint=url, api_key="none")
    designer = import_module("data_designer.interface").DataDesigner(
        f"{folder}/artifacts", model_providers=[provider], auto_configure_logging=False
    )
    designer.set_run_config(
        dd.RunConfig(
            jinja_rendering_engine=dd.JinjaRenderingEngine.NATIVE,
            otel_metrics_port=None,
            progress_interval=3600,
        )
    )
    config = dd.DataDesignerConfigBuilder(
        model_configs=[
            dd.ModelConfig(
                alias="model",
                model=model,
                provider="server",
                inference_parameters=dd.ChatCompletionInferenceParams(
                    temperature=TEMPERATURE, max_tokens=MAX_TOKENS, max_parallel_requests=CONCURRENCY
                ),
                skip_health_check=True,
            )
        ]
    )
    config.with_seed_dataset(dd.LocalFileSeedSource(path=seeds))
    config.add_column(dd.LLMTextColumnConfig(name="answer", model_alias="model", prompt="{{ prompt }}"))
    designer.create(config, num_records=int(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
