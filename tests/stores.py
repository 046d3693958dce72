"""A server that speaks S3, on a free port of loopback, with two users: one may write to a bucket, one may read it."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.brokers import serving

BUCKET = "captures"
_SETTING_UP = 7
"""Calls that nobody need sign: those below."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a user shows."""

    key: str
    secret: str

    def environment(self, endpoint: str) -> dict[str, str]:
        """As the usual chain reads it."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@dataclass(frozen=True, slots=True)
class Store:
    """A store that is up.

    Attributes:
        port: on which it answers.
        writer, reader: who may do what.
    """

    port: int
    writer: Keys
    reader: Keys

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def let(monkeypatch: pytest.MonkeyPatch, keys: Keys, endpoint: str) -> None:
    """This process, and those that it starts, have these keys, and no others."""
    for name, value in keys.environment(endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    files: Any = importlib.import_module("s3fs")
    files.S3FileSystem.clear_instance_cache()


@asynccontextmanager
async def s3() -> AsyncIterator[Store]:
    """A store with one bucket; skips the test where it is not installed."""
    for module in ("moto", "flask", "flask_cors", "s3fs"):
        pytest.importorskip(module, reason="no S3 server: moto, or what it needs, is not installed")
    program = (
        f"import os; os.environ['INITIAL_NO_AUTH_ACTION_COUNT'] = '{_SETTING_UP}'; from moto.server import main; main()"
    )
    async with serving(sys.executable, lambda port: ["-c", program, "-H", "127.0.0.1", "-p", str(port)]) as server:
        yield await asyncio.to_thread(_set_up, server.port)


def _set_up(port: int) -> Store:
    boto3: Any = importlib.import_module("boto3")
    named = {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"}
    known = {"aws_access_key_id": "nobody", "aws_secret_access_key": "none"}
    s3, iam = (boto3.client(each, **named, **known) for each in ("s3", "iam"))
    try:
        s3.create_bucket(Bucket=BUCKET)
        return Store(port, _user(iam, "writer", '"s3:*"'), _user(iam, "reader", '"s3:Get*", "s3:List*"'))
    finally:
        s3.close()
        iam.close()


def _user(iam: Any, name: str, may: str) -> Keys:
    document = f'{{"Version": "2012-10-17", "Statement": [{{"Effect": "Allow", "Action": [{may}], "Resource": "*"}}]}}'
    iam.create_user(UserName=name)
    iam.put_user_policy(UserName=name, PolicyName="may", PolicyDocument=document)
    made = iam.create_access_key(UserName=name)["AccessKey"]
    return Keys(made["AccessKeyId"], made["SecretAccessKey"])
