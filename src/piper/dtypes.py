"""Element types, by torch's names, for the layers that are free of torch."""

from enum import StrEnum


class DType(StrEnum):
    """Element types by torch's names."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_floating(self) -> bool:
        """Whether values of this type can carry gradients."""
        return self.value.startswith(("float", "bfloat", "complex"))

    @property
    def is_real_floating(self) -> bool:
        """Whether it is a floating-point type that is not complex: what mixed precision speaks
        of.
        """
        return self.value.startswith(("float", "bfloat"))


_ITEMSIZE = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.COMPLEX64: 8,
    DType.COMPLEX128: 16,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.INT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.BOOL: 1,
}
