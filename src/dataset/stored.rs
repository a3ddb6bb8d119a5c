//! Rows in the type of their file: their size, and their conversion to the values that models read.

use std::fmt;

use half::f16;

/// The type of the numbers in a file, as they are in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // named as in Rust
pub enum StoredType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    F16,
    F32,
    F64,
}

impl StoredType {
    /// Returns true for real numbers.
    pub fn is_real(self) -> bool {
        matches!(self, StoredType::F16 | StoredType::F32 | StoredType::F64)
    }
}

/// Calls a macro with the Rust type of a [`StoredType`].
macro_rules! with_type {
    ($stored:expr, $call:ident) => {
        match $stored {
            StoredType::U8 => $call!(u8),
            StoredType::I8 => $call!(i8),
            StoredType::U16 => $call!(u16),
            StoredType::I16 => $call!(i16),
            StoredType::U32 => $call!(u32),
            StoredType::I32 => $call!(i32),
            StoredType::U64 => $call!(u64),
            StoredType::I64 => $call!(i64),
            StoredType::F16 => $call!(f16),
            StoredType::F32 => $call!(f32),
            StoredType::F64 => $call!(f64),
        }
    };
}
pub(super) use with_type;

impl fmt::Display for StoredType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        macro_rules! name {
            ($type:ty) => {
                formatter.write_str(stringify!($type))
            };
        }
        with_type!(self, name)
    }
}

/// A number that files hold.
pub(super) trait Stored: bytemuck::Pod {
    /// Returns the nearest value that models read.
    fn value(self) -> f32;
}

macro_rules! stored {
    ($($type:ty)*) => {
        $(impl Stored for $type {
            fn value(self) -> f32 {
                self as f32
            }
        })*
    };
}
stored!(u8 i8 u16 i16 u32 i32 u64 i64 f32 f64);

impl Stored for f16 {
    fn value(self) -> f32 {
        self.to_f32()
    }
}

/// The inputs or the targets of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ColumnFormat {
    /// The type of the numbers.
    pub stored: StoredType,
    /// The number of values in a row.
    pub len: usize,
    /// The number of channels of an image, which come first in the file and are moved last.
    pub channels: usize,
    /// The divisor of stored values: 255 for images of bytes.
    pub divisor: f32,
}

impl ColumnFormat {
    /// Returns the number of bytes in a row.
    pub fn bytes(&self) -> usize {
        macro_rules! bytes {
            ($type:ty) => {
                size_of::<$type>()
            };
        }
        self.len * with_type!(self.stored, bytes)
    }

    /// Converts a row to the values that models read: channels last, divided by the divisor.
    pub fn decode(&self, row: &[u8], values: &mut [f32]) {
        macro_rules! decode {
            ($type:ty) => {
                self.decode_as::<$type>(row, values)
            };
        }
        with_type!(self.stored, decode);
    }

    fn decode_as<T: Stored>(&self, row: &[u8], values: &mut [f32]) {
        let stored = |bytes: &[u8]| bytemuck::pod_read_unaligned::<T>(bytes).value();
        let plane = self.len / self.channels.max(1) * size_of::<T>();
        for (channel, bytes) in row.chunks_exact(plane.max(1)).enumerate() {
            let numbers = bytes.chunks_exact(size_of::<T>());
            if self.channels == 1 && self.divisor == 1.0 {
                values.iter_mut().zip(numbers).for_each(|(value, bytes)| *value = stored(bytes));
            } else {
                let places = values[channel..].iter_mut().step_by(self.channels);
                places.zip(numbers).for_each(|(value, bytes)| *value = stored(bytes) / self.divisor);
            }
        }
    }
}

/// The bytes of one sample: its inputs, and its targets behind them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowFormat {
    /// The inputs.
    pub inputs: ColumnFormat,
    /// The targets, if there are any.
    pub targets: Option<ColumnFormat>,
}

impl RowFormat {
    /// Returns the number of bytes of a sample.
    pub fn bytes(&self) -> usize {
        self.inputs.bytes() + self.targets.map_or(0, |targets| targets.bytes())
    }

    /// Converts a sample; an empty `inputs` or `targets` is skipped.
    pub fn decode(&self, row: &[u8], inputs: &mut [f32], targets: &mut [f32]) {
        let (first, second) = row.split_at(self.inputs.bytes());
        if !inputs.is_empty() {
            self.inputs.decode(first, inputs);
        }
        if let (Some(format), false) = (&self.targets, targets.is_empty()) {
            format.decode(&second[..format.bytes()], targets);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_type_become_values_with_channels_last() {
        let format = |stored, channels, divisor| ColumnFormat { stored, len: 4, channels, divisor };
        let decode = |format: ColumnFormat, bytes: &[u8]| {
            assert_eq!(format.bytes(), bytes.len());
            let mut values = [0.0; 4];
            // at an odd address
            let moved = [&[0], bytes].concat();
            format.decode(&moved[1..], &mut values);
            values
        };
        assert_eq!(decode(format(StoredType::U8, 2, 255.0), &[0, 51, 255, 102]), [0.0, 1.0, 0.2, 0.4]);
        let halves = [1.0, -2.0, 0.5, 65504.0].map(f16::from_f32);
        assert_eq!(
            decode(format(StoredType::F16, 1, 1.0), bytemuck::cast_slice(&halves)),
            [1.0, -2.0, 0.5, 65504.0]
        );
        let large = [i64::MAX, -1, 16_777_217, 0];
        let values = decode(format(StoredType::I64, 1, 1.0), bytemuck::cast_slice(&large));
        assert_eq!(values, [9.223_372e18, -1.0, 16_777_216.0, 0.0]);
        let doubles = [0.1, 1e300, -0.0, 3.0];
        let values = decode(format(StoredType::F64, 1, 1.0), bytemuck::cast_slice(&doubles));
        assert_eq!(values, [0.1, f32::INFINITY, -0.0, 3.0]);
    }
}
