"""The generated messages and stubs, under short names.

protobuf warns about stubs that are one major version older than itself. They are supported, so the warning is not shown.
"""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Protobuf gencode version")
    from .v1 import prefill_pb2 as pb
    from .v1.prefill_pb2_grpc import PrefillServiceStub

__all__ = ["PrefillServiceStub", "pb"]
