"""All mutants, by the law that refutes them, and all changes that break no rule."""

from __future__ import annotations

from types import ModuleType

from tests.audit.mutants import adversary, documents, held_out, running, scoring
from tests.audit.mutants.hostile import HOSTILE
from tests.audit.mutants.legal import LEGAL, LEGAL_OF_DOCUMENTS
from tests.audit.mutants.trial import Mutant, honest, other_nats, scorer

BY_LAW: dict[str, dict[str, Mutant]] = {
    "endings": {
        "next-chunk-in-the-second-epoch": Mutant(scorer(scoring.next_chunk_in_second_epoch)),
        "rescore": Mutant(scorer(scoring.rescore)),
        "min-over-passes": Mutant(scorer(scoring.min_over_passes)),
        "learning-rate-picked-in-private": Mutant(scorer(scoring.rate_picked_in_private)),
        "better-of-two-per-chunk": Mutant(scorer(scoring.better_of_two_per_chunk)),
        "dropped-tail": Mutant(scorer(scoring.dropped_tail)),
        "double-tail": Mutant(scorer(scoring.double_tail)),
        "counts-of-the-whole-text": Mutant(other_nats(scoring.counts_of_whole_text)),
        "constant-fitted-to-the-text": Mutant(other_nats(scoring.constant_fitted_to_text)),
        "random-scores": Mutant(other_nats(scoring.noisy)),
        "learning-rate-picked-by-score": Mutant(scoring.wrapped_evaluate(scoring.rate_picked_by_score)),
        "second-evaluation": Mutant(scoring.wrapped_evaluate(scoring.second_evaluation)),
        "shorter-text": Mutant(scoring.wrapped_evaluate(scoring.shorter_text)),
        "ledger-written-past-record": Mutant(scoring.ledger_written_past_record),
        "attention-looks-ahead": Mutant(scoring.looks_ahead),
        "mean-of-the-row": Mutant(scoring.changed_forward(scoring.mean_of_row)),
        "mean-of-the-batch": Mutant(scoring.changed_forward(scoring.mean_of_batch)),
        "batches-ordered-by-score": Mutant(documents.ordered_by_score, "documents"),
        "adapters-drawn-by-row": Mutant(documents.drawn_by_row, "documents"),
        "chunks-by-document-length": Mutant(documents.chunks_by_length, "documents"),
        "learning-rate-picked-in-the-run": Mutant(running.rate_picked_after_reloading),
        "moved-by-the-longest": Mutant(
            adversary.wrapped("DocumentScorer.read", adversary.moved_by_the_longest), "documents"
        ),
        "scored-with-its-neighbor": Mutant(
            adversary.wrapped("DocumentScorer.nats", held_out.scored_with_its_neighbor), "documents"
        ),
        "first-of-a-batch-flattered": Mutant(
            adversary.wrapped("DocumentScorer.nats", held_out.first_of_a_batch_flattered), "documents"
        ),
        "adapters-by-hindsight": Mutant(documents.scored_by(held_out.adapters_by_hindsight), "documents"),
        "warmed-by-a-later-token": Mutant(other_nats(held_out.warmed_by_a_later_token)),
        "warmed-by-the-length-of-the-text": Mutant(
            adversary.wrapped("DocumentScorer.nats", held_out.warmed_by_the_length), "documents"
        ),
        **scoring.carried_in_every_order(),
    },
    "documents": {
        "cross-document-smear": Mutant(scoring.changed_forward(scoring.smear)),
        "cross-document-attention": Mutant(scoring.unmasked_documents),
        "adapters-kept-from-the-batch-before": Mutant(documents.kept_adapters, "documents"),
        "first-adapters-that-learn": Mutant(documents.first_adapters_learn, "documents"),
        "roundtrip-that-learns": Mutant(adversary.roundtrip_that_learns),
    },
    "sums": {
        "knows-where-documents-end": Mutant(other_nats(held_out.knows_where_documents_end)),
        "adapt-then-score": Mutant(scorer(scoring.adapt_then_score)),
        "one-token-past-the-chunk": Mutant(scorer(scoring.one_token_past)),
        "pre-quantization-ttt": Mutant(scorer(scoring.pre_quantization_ttt)),
        "last-chunk-first": Mutant(scorer(scoring.last_chunk_first)),
        "shift-on-scored-targets": Mutant(scorer(scoring.shift_on_scored_targets)),
        "target-in-key-cache": Mutant(other_nats(scoring.target_in_key)),
        "long-match-cache": Mutant(other_nats(scoring.long_match_cache)),
        "gate-on-the-realised-token": Mutant(other_nats(scoring.gate_on_target)),
        "expert-by-hindsight": Mutant(other_nats(scoring.expert_by_hindsight)),
        "unnormalized-mixture": Mutant(other_nats(scoring.unnormalized_mixture)),
        "clipped-losses": Mutant(other_nats(scoring.clipped)),
        "free-document-starts": Mutant(other_nats(scoring.free_document_starts)),
        "counts-with-the-target": Mutant(other_nats(scoring.counts_with_target)),
        "shift-from-the-next-token": Mutant(scoring.changed_forward(scoring.next_token_shift)),
        "adapters-learn-before-the-score": Mutant(
            documents.scored_by(documents.learn_then_score), "documents"
        ),
        "rescored-after-the-last-chunk": Mutant(
            documents.scored_by(documents.rescored_after_the_last_chunk), "documents"
        ),
        "padding-that-learns": Mutant(documents.scored_by(documents.padding_that_learns), "documents"),
        "own-chunk-learned-early": Mutant(documents.scored_by(documents.own_chunk_early), "documents"),
        "second-epoch-one-token-past": Mutant(scorer(adversary.second_epoch_past)),
        "past-the-second-chunk": Mutant(scorer(adversary.past_the_second_chunk)),
        "moved-by-its-own-length": Mutant(
            adversary.wrapped("DocumentScorer.read", adversary.moved_by_its_own_length), "documents"
        ),
        "clipped-after-200": Mutant(adversary.clipped_after(adversary.two_hundred_targets)),
        "clipped-after-eight-documents": Mutant(adversary.clipped_after(adversary.eight_documents)),
        "clipped-deep-in-documents": Mutant(
            adversary.wrapped("DocumentScorer.record", adversary.clipped_deep_in_documents), "documents"
        ),
        "ledger-clipped-late": Mutant(adversary.wrapped("Ledger.record", adversary.ledger_clipped_late)),
        "bigram-of-the-next-token": Mutant(
            adversary.wrapped("bigram_rows", adversary.bigram_of_the_next), "sgd",
            {"BIGRAM_VOCAB_SIZE": "16", "BIGRAM_DIM": "8"},
        ),
        "values-of-the-next-token": Mutant(
            adversary.wrapped("table_rows", adversary.values_of_the_next), "sgd",
            {"VE_ENABLED": "1", "VE_DIM": "8", "VE_LAYERS": "0,1"},
        ),
    },
    "vocabulary": {
        "long-pieces-count-more": Mutant(running.unchecked(adversary.long_pieces_count_more), "configured"),
        "softmax-over-the-top": Mutant(
            adversary.wrapped("GPT.loss_per_token", adversary.softmax_over_the_top), "configured"
        ),
        "later-ids-flattered": Mutant(
            adversary.wrapped("GPT.loss_per_token", adversary.later_ids_flattered), "configured"
        ),
    },
    "counts": {
        "more-bytes": Mutant(scoring.wrapped_evaluate(scoring.more_bytes), "documents"),
        "best-label-for-all": Mutant(scoring.wrapped_evaluate(scoring.best_label_for_all), "documents"),
        "flattering-log": Mutant(scoring.wrapped_evaluate(scoring.flattering_log), "documents"),
        "two-log-lines": Mutant(scoring.logged_before_the_end, "documents"),
        "ledger-sums-the-easy-part": Mutant(scoring.ledger_sums_the_easy_part, "documents"),
        "double-space-bytes": Mutant(running.unchecked(running.double_space_bytes), "documents"),
        "byte-pieces-as-text": Mutant(running.unchecked(running.byte_pieces_as_text), "documents"),
        "characters-as-bytes": Mutant(running.unchecked(running.characters_as_bytes), "documents"),
        "document-starts-counted": Mutant(running.document_starts_counted, "documents"),
        "case-marks-as-text": Mutant(running.case_marks_as_text, "documents"),
        "more-bytes-in-the-run": Mutant(running.more_bytes_in_the_run, "documents"),
        "fewer-targets-in-the-run": Mutant(running.fewer_targets_in_the_run, "documents"),
        "spaces-after-bos-counted": Mutant(
            running.unchecked(adversary.is_text_where(adversary.document_starts)), "documents"
        ),
        "spaces-after-all-ids-counted": Mutant(
            running.unchecked(adversary.is_text_where(adversary.all_ids)), "documents"
        ),
        "sidecar-and-one-a-document": Mutant(
            running.unchecked(adversary.wrapped("token_bytes", adversary.sidecar_and_one)), "documents"
        ),
        "bytes-of-pieces-for-a-sidecar": Mutant(running.unchecked(running.sidecar_ignored), "documents"),
        "bytes-of-the-document-before": Mutant(
            running.unchecked(adversary.wrapped("token_bytes", held_out.bytes_of_the_document_before)),
            "documents",
        ),
        "byte-each-ten-thousand": Mutant(
            adversary.wrapped("token_bytes", adversary.byte_each_ten_thousand), "documents"
        ),
        "kind-to-long-texts": Mutant(
            adversary.wrapped("Ledger.score", adversary.kind_to_long_texts), "documents"
        ),
        "median-of-long-texts": Mutant(
            adversary.wrapped("Ledger.score", adversary.median_of_long_texts), "documents"
        ),
        "part-called-comparable": Mutant(
            adversary.wrapped("read_validation", adversary.part_called_comparable), "documents"
        ),
        "lines-without-marks": Mutant(
            adversary.wrapped("evaluate", adversary.lines_without_marks), "documents"
        ),
    },
    "validation": {
        "ships-another-program": Mutant(adversary.wrapped("shipped_code", adversary.another_program)),
        "calibration-on-validation": Mutant(running.calibration_on_validation, "configured"),
        "training-on-validation": Mutant(running.training_on_validation, "configured"),
        "training-text-in-evaluation": Mutant(running.training_text_in_evaluation, "configured"),
        "average-picked-by-validation": Mutant(running.average_picked_by_validation, "configured"),
        "text-hidden-in-the-weights": Mutant(running.text_hidden_in_the_weights, "configured"),
        "unquantized-weights-scored": Mutant(running.unquantized_weights_scored, "configured"),
        "second-file": Mutant(running.second_file, "configured"),
        "fewer-bytes-counted": Mutant(running.fewer_bytes_counted, "configured"),
        "weights-mended-after-loading": Mutant(running.weights_mended_after_loading, "configured"),
        "settings-of-training": Mutant(running.settings_of_training_in_evaluation),
        "scaled-by-validation": Mutant(adversary.scaled_by_validation),
        "bits-by-the-text": Mutant(adversary.bits_by_the_text),
        "damping-by-the-text": Mutant(adversary.damping_by_the_text),
        "rate-by-rising-validation": Mutant(adversary.by_rising_validation("learning_rate_scale")),
        "momentum-by-rising-validation": Mutant(adversary.by_rising_validation("muon_momentum")),
        "code-without-its-wrapper": Mutant(adversary.wrapped("summarize", adversary.code_without_wrapper)),
        "total-without-the-code": Mutant(adversary.wrapped("Run.log", adversary.total_without_code)),
        "one-percent-over-the-limit": Mutant(adversary.over_the_limit(1.01, 0)),
        "three-thousand-over-the-limit": Mutant(adversary.over_the_limit(1.0, 3000)),
        "weights-beside-the-data": Mutant(adversary.weights_in(adversary.beside_the_data)),
        "weights-in-shared-memory": Mutant(adversary.weights_in(adversary.in_shared_memory)),
    },
    "warm-up": {
        "warm-up-stays": Mutant(running.warm_up_stays, "configured"),
        "prefetch-skips": Mutant(running.prefetch_skips, "configured"),
    },
    "many-steps": {
        "steps-while-validating": Mutant(held_out.steps_while_validating, "documents"),
        "each-fiftieth-batch-is-validation": Mutant(adversary.fiftieth_batch_of_validation, "documents"),
    },
    "ranks": {
        "weights-not-restored": Mutant(scorer(honest, restore=False)),
        "gradients-not-shared": Mutant(running.gradients_not_shared),
        "ranks-add-twice": Mutant(running.ranks_add_twice),
        "rate-grows-with-ranks": Mutant(running.rate_grows_with_ranks),
        "rehearsal-that-learns": Mutant(
            adversary.wrapped("rehearse_evaluation", adversary.rehearsal_that_learns)
        ),
        "partial-batches-flattered": Mutant(
            adversary.wrapped("WindowScorer._score_batch", adversary.partial_batches_flattered)
        ),
        "compiled-documents-flattered": Mutant(
            adversary.wrapped("DocumentScorer.nats", adversary.compiled_documents_flattered), "documents"
        ),
        "faster-with-three-ranks": Mutant(adversary.faster_with(3)),
        "kind-with-eight-ranks": Mutant(adversary.kind_with(8)),
        "kinder-with-two-ranks": Mutant(adversary.wrapped("summarize", adversary.kinder_with_two_ranks)),
    },
    "trained-by-two": {
        "second-rank-calibrates-on-validation": Mutant(
            adversary.wrapped("collect_hessians", held_out.second_rank_calibrates), "projected tables"
        ),
        "second-rank-trains-on-validation": Mutant(
            adversary.batches_of_validation(lambda machine: machine.rank == 1), "projected tables"
        ),
    },
    "clock-of-training": {
        "everything-by-a-slow-clock": Mutant(held_out.slow_clock_everywhere, "documents"),
        "trains-by-a-slow-clock": Mutant(adversary.slow_training, "documents"),
        "limits-are-always-kept": Mutant(adversary.wrapped("log_limit", adversary.always_kept), "documents"),
    },
    "clock-of-scores": {
        "scores-by-a-slow-clock": Mutant(adversary.wrapped("summarize", adversary.slow_scores), "documents"),
        "unlearned-by-their-losses": Mutant(documents.unlearned_by_losses, "documents"),
        "clock-read-inside-a-document": Mutant(documents.clock_inside_a_document, "documents"),
    },
}
LAW_OF: dict[str, str] = {name: law for law, mutants in BY_LAW.items() for name in mutants}

# What no law sees, and why: for a replay, for the unit tests, or for nobody.
UNSEEN: dict[str, tuple[Mutant, str]] = {
    "other-weights-scored": (
        Mutant(scoring.scores_with_other_weights),
        "other weights, but a function of the artifact, and the same in every run",
    ),
    "better-on-second-sight": (
        Mutant(scoring.better_on_second_sight),
        "it needs a state that no two processes share",
    ),
    "warm-up-on-validation": (
        Mutant(scoring.wrapped_evaluate(scoring.warm_up_on_validation)),
        "the text is read early, and nothing of it is kept: no bit of a score moves",
    ),
    "ledger-takes-overwrites": (
        Mutant(scoring.ledger_takes_overwrites),
        "a net is taken away, and nobody falls: no figure is wrong",
    ),
    "tokenizer-drops-case": (
        Mutant(running.tokenizer_drops_case),
        "it is asked to encode by checks alone; bytes are counted by decoding",
    ),
    "rehearsal-on-validation": (
        Mutant(adversary.rehearsal_on_validation),
        "the text is read early, and nothing of it is kept: no bit of a score moves",
    ),
    "warm-up-steps-on-validation": (
        Mutant(adversary.with_batches_of_validation('warm_up')),
        "steps on the text are undone exactly: no bit of the artifact moves",
    ),
    "rehearsed-hessians-of-validation": (
        Mutant(adversary.with_batches_of_validation('rehearse_end')),
        "what is made of the text is thrown away: no bit of the artifact moves",
    ),
    "roundtrip-that-slides": (
        Mutant(adversary.roundtrip_that_slides),
        "a diagnosis has another name than it should; it does not rank",
    ),
    "learns-past-its-time": (
        Mutant(held_out.slow_clock_of_learning, "documents"),
        "its limit is reported as exceeded, which a record may not have",
    ),
    "windows-of-a-gpu-flattered": (
        Mutant(adversary.wrapped('WindowScorer._score_batch', adversary.windows_of_a_gpu_flattered)),
        "no GPU here: a replay of the run differs",
    ),
    "heads-of-the-next-token": (
        Mutant(adversary.wrapped('repeat_heads', adversary.heads_of_the_next)),
        "no GPU here: a replay of the run differs",
    ),
    "batches-of-a-gpu-of-validation": (
        Mutant(adversary.batches_of_validation(lambda machine: machine.on_gpu)),
        "no GPU here: in the text of a script its branch is listed as not run",
    ),
    "later-batches-calibrate": (
        Mutant(adversary.wrapped('calibration_batches', adversary.later_batches_calibrate)),
        "other training batches calibrate: the artifact is honest",
    ),
    "hessians-of-their-own": (
        Mutant(adversary.wrapped('Quantizer._inverse_factor', adversary.moved_by_damping)),
        "another way to round: the artifact is honest",
    ),
    "flattered-by-an-old-compiler": (
        Mutant(adversary.wrapped('Machine.compile', adversary.flattered_without_the_fusion)),
        "no such torch here: a replay of the run differs",
    ),
    "no-file-too-large": (
        Mutant(adversary.wrapped('check_size', adversary.unlimited)),
        "a net is taken away, and nobody falls: sizes are counted",
    ),
    "every-id-taken": (
        Mutant(adversary.wrapped('read_tokens', adversary.every_id)),
        "a net is taken away, and nobody falls: data are those of the auditor",
    ),
    "score-without-scores": (
        Mutant(adversary.wrapped('Ledger.score', adversary.mean_of_what_is_there)),
        "a net is taken away, and nobody falls: no figure is wrong",
    ),
}
MUTANTS: dict[str, Mutant] = {
    **{name: mutant for mutants in BY_LAW.values() for name, mutant in mutants.items()},
    **{name: mutant for name, (mutant, _) in UNSEEN.items()},
}


def awaken(name: str, script: ModuleType) -> None:
    """Change a loaded script."""
    others = {**LEGAL, **LEGAL_OF_DOCUMENTS, **HOSTILE}
    change = others[name] if name in others else MUTANTS[name].change
    change(script)
