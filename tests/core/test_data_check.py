"""Live records that the loss is not defined for are refused, in words that tell nothing about them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sottovoce_core.data import check_batch
from sottovoce_core.errors import DataError
from sottovoce_core.losses.linear import (
    HingeLoss,
    LeastSquaresLoss,
    LogisticLoss,
    RidgeLoss,
    SmoothedHingeLoss,
    SoftmaxLoss,
)
from sottovoce_core.losses.loss import Loss

LOGISTIC, RIDGE = LogisticLoss(), RidgeLoss()
SECRET = 8.625
"""A record value that no message may quote."""


def test_accepts_records_of_each_loss() -> None:
    check_batch(np.full((2, 3), SECRET), np.array([0.0, 1.0]), 3, LOGISTIC)
    check_batch(np.full((2, 3), SECRET), np.array([-2.5, SECRET]), 3, RIDGE)
    check_batch(np.full((2, 3), SECRET), np.array([-2.5, SECRET]), 3, LeastSquaresLoss())
    check_batch(np.full((2, 3), SECRET), np.array([0.0, 1.0]), 3, HingeLoss())
    check_batch(np.full((2, 3), SECRET), np.array([0.0, 4.0]), 3, SoftmaxLoss(classes=5))


def test_accepts_a_round_without_records() -> None:
    check_batch(np.empty((0, 3)), np.empty(0), 3, LOGISTIC)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (np.full(3, SECRET), np.zeros(1), r"shape \(records, 3\), got 1 axes"),
        (np.full((2, 4), SECRET), np.zeros(2), "must have 3 features, got 4"),
        (np.full((2, 3), SECRET), np.zeros(1), r"shape \(2,\), one for each record, got \(1,\)"),
        (np.full((2, 3), SECRET), np.zeros((2, 1)), r"got \(2, 1\)"),
        (np.array([[SECRET, SECRET, np.nan]]), np.zeros(1), "features must be finite"),
        (np.array([[SECRET, SECRET, -np.inf]]), np.zeros(1), "features must be finite"),
        (np.full((1, 3), SECRET), np.array([np.nan]), "labels must be finite"),
        (np.full((1, 3), SECRET), np.array([SECRET]), "must be 0 or 1"),
        (np.full((1, 3), SECRET), np.array([-1.0]), "must be 0 or 1"),
    ],
)
def test_refuses(features: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        check_batch(features, labels, 3, LOGISTIC)
    assert "8.6" not in str(caught.value)
    assert "-1" not in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "allowed"),
    [
        (HingeLoss(), "of the hinge loss must be 0 or 1,"),
        (SmoothedHingeLoss(), "of the smoothed_hinge loss must be 0 or 1,"),
        (SoftmaxLoss(classes=2), "of the softmax loss must be 0 or 1,"),
        (SoftmaxLoss(classes=5), "of the softmax loss must be whole numbers from 0 to 4,"),
    ],
    ids=str,
)
@pytest.mark.parametrize("label", [-1.0, 0.5, 5.0, SECRET])
def test_refuses_labels_that_are_no_class(loss: Loss, allowed: str, label: float) -> None:
    with pytest.raises(DataError, match=allowed) as caught:
        check_batch(np.zeros((2, 1)), np.array([0.0, label]), 1, loss)
    assert str(label) not in str(caught.value)


def test_ridge_takes_any_finite_label_but_no_other() -> None:
    check_batch(np.zeros((1, 1)), np.array([-7.0]), 1, RIDGE)
    with pytest.raises(DataError, match="labels must be finite"):
        check_batch(np.zeros((1, 1)), np.array([np.inf]), 1, RIDGE)


def test_import_pulls_in_no_reader_of_files() -> None:
    code = "import sys, sottovoce_core.data; print([m for m in ('sklearn', 'pyarrow', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
