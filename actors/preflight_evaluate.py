"""Everything that can be wrong with an `evaluate` run and seen without starting it: models, tokenizers, and the problems' lengths."""

from __future__ import annotations

from actors.environments import build
from actors.models.hf import check_model_dir
from actors.preflight import check_answers, check_head_size, check_set, load_encoder, room_for_prompts
from actors.rollout.prompts import fit
from configs.base import ConfigError
from configs.evaluate import EvaluateConfig

_FIELD = "sampling.max_new_tokens"


def check_evaluation(config: EvaluateConfig) -> int:
    """Models, tokenizers and problems fit each other. Returns the number of problems.

    Raises:
        ConfigError: what does not, and what to change.
    """
    source = config.source
    try:
        environment = build(source, config.seed)
    except ConfigError as error:
        raise ConfigError(str(error).replace("environment.path", "problems")) if config.problems else error from None
    problems = [environment.problem("validation", index) for index in range(environment.size("validation"))]
    for name, path in config.models.items():
        try:
            shape = check_model_dir(path)
            check_head_size(shape)
            encoder = load_encoder(path, shape, source.system_prompt, source.chat_template_kwargs)
            room = room_for_prompts(config.generation, config.sampling.max_new_tokens, int(shape.max_position_embeddings), _FIELD)
        except ConfigError as error:
            raise ConfigError(str(error).replace("model.path:", f"{name}:")) from None
        for problem in problems:
            fit(problem, encoder.prompt(problem), room, source.on_too_long)
        for of_set, its_source in config.validation.sets.items():
            check_set(config, of_set, its_source, path, shape, room, config.seed)
    check_answers(config, source, environment, config.seed)
    return len(problems)
