"""A tokenizer and a model small enough to compare with hand-made references, in float64 where a test needs it."""

import string
from collections.abc import Callable
from typing import Any

import pytest

# Tests of defects that are known and not yet mended: test to the parameters that fail, all of them if none is named.
# Strict: a mended one fails here until its line is taken out.
KNOWN_DEFECTS: dict[str, tuple[str, ...]] = {
    # config
    "test_what_is_no_yaml_is_an_input_error_with_its_line": ("2026-02-31", "!!int", "!!bool", "[[[["),
    "test_a_wrong_key_or_value_is_named_by_its_path_in_one_line": ("[trian: ",),
    "test_what_is_wrong_in_teachers_yaml_is_named": ("[domains: [math-domain", "-model: {wieght"),
    # files, runs
    "test_what_is_no_json_is_named_with_its_place": ("[number too long]", "[nested too deep]"),
    "test_a_missing_file_and_a_folder_are_input_errors": (),
    "test_a_model_that_is_nowhere_lists_what_there_is": ("[]",),
    "test_reading_a_log_that_a_kill_cut_short_gives_its_complete_lines": (),
    # objective
    "test_a_policy_probability_that_underflows_counts_as_zero": (),
    "test_no_gradient_flows_into_an_advantage_that_the_caller_did_not_detach": (),
    # engines
    "test_a_budget_of_zero_gives_an_empty_answer_beside_others": (),
    "test_gradient_checkpointing_does_not_change_what_is_sampled": (),
    "test_a_damaged_weights_file_is_named": (),
    "test_an_empty_prompt_is_refused": (),
    # train
    "test_as_many_micro_batches_come_out_as_asked_for_where_there_are_so_many_sequences": (),
    "test_a_loss_mask_of_the_wrong_length_names_the_sample": (),
    "test_a_stream_that_only_some_sequences_have_names_the_sample": (),
    "test_a_tokenizer_that_marks_the_beginning_of_text_marks_it_once": (),
    "test_a_conversation_that_the_assistant_opens_needs_generation_tags": (),
    "test_a_template_with_a_choice_by_purpose_is_used_like_any_other": (),
    "test_a_line_that_is_no_object_is_named": ("[number too long]", "[nested too deep]"),
    "test_fields_that_parquet_fills_up_with_nulls_are_as_absent_as_in_jsonl": (),
    "test_extra_tensors_come_back_bit_by_bit_even_where_two_share_memory": (),
    "test_the_state_of_another_model_is_refused": ("tie_word_embeddings",),
    "test_a_figure_that_one_teacher_lacks_is_missing_and_not_zero": (),
    # verifiers
    "test_a_constraint_that_nobody_can_check_is_blamed_whatever_the_response": (
        "title",
        "UPPER",
        "'separator': ''",
        "'count': '3'",
        "'inner'",
        "[case]",
        "[['case']]",
        "[{'kind': 'case', 'case': 'upper'}]",
    ),
    "test_an_unknown_constraint_beside_a_broken_one_is_blamed_in_any_order": ("[order0]",),
    "test_exact_match_without_a_usable_answer_blames_the_reference": ("[reference5]", "[reference6]"),
    "test_integer_with_an_answer_that_is_no_integer_blames_the_reference": (
        "[seven]",
        "[]",
        "[7.5]",
        "[inf]",
        "[nan]",
        "[True]",
        "[\\u0667]",
        "[7.0]",
    ),
    "test_deeply_nested_responses_are_a_verdict_and_no_crash": ("[900]",),
    "test_what_a_degenerate_model_writes_is_read_in_linear_time": ("[line breaks]", "[blank lines]", "[open calls]"),
    "test_a_reference_without_usable_calls_is_blamed_whatever_the_response": ("{'calls': [",),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expects the known defects to fail."""
    for item in items:
        name = getattr(item, "originalname", "")
        parameters = KNOWN_DEFECTS.get(name)
        if parameters is not None and (not parameters or any(p in item.name for p in parameters)):
            item.add_marker(pytest.mark.xfail(reason="a known defect", strict=True))


# `[` and `]` stand where generation tags may go.
CHATML = """\
{%- if tools %}<|im_start|>system{{ '\\n' }}{{ tools | tojson }}<|im_end|>{{ '\\n' }}{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}{{ '\\n' }}
{%- if message.role == 'assistant' %}[{{ message.content or '' }}
{%- for call in message.tool_calls or () %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}<|im_end|>]{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"""


@pytest.fixture(scope="session")
def chatml() -> str:
    """A ChatML template without generation tags: each turn is `<|im_start|>role`, text, `<|im_end|>`, a line break."""
    return CHATML.replace("[", "").replace("]", "")


@pytest.fixture(scope="session")
def tagged_chatml() -> str:
    """The same template with the assistant's text and end token inside generation tags."""
    return CHATML.replace("[", "{% generation %}").replace("]", "{% endgeneration %}")


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """Makes a tokenizer of printable ASCII characters, three merges and three special tokens: 106 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def make(*, chat_template: str | None = None, metaspace: bool = False) -> Any:
        merges = [("t", "h"), ("th", "e"), ("a", "n")]
        characters = [*string.printable, *(["\u2581"] if metaspace else []), *("".join(pair) for pair in merges)]
        tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(characters)}, merges))
        if metaspace:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="<|pad|>",
            eos_token="<|im_end|>",
            additional_special_tokens=["<|im_start|>"],
            chat_template=chat_template,
            clean_up_tokenization_spaces=False,
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def make_llama(tokenizer: Any) -> Callable[..., Any]:
    """Makes a two-layer Llama of width 32, with weights large enough that its distributions are far from uniform."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)  # threads only get into each other's way at this size, tenfold on a busy machine

    def make(*, seed: int = 0, vocab_size: int | None = None, **changes: Any) -> Any:
        config = LlamaConfig(
            **{
                "vocab_size": vocab_size or len(tokenizer),
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
                "initializer_range": 0.3,
                "pad_token_id": tokenizer.pad_token_id,
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
            }
            | changes
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LlamaForCausalLM(config).eval()

    return make
