//! Flushing of subnormal numbers to zero: they arise where a loss is near zero, and arithmetic with
//! one costs a hundred times as much as with a normal number.

/// Runs `work` with subnormal results and arguments flushed to zero, on this thread and on those
/// that it starts.
#[allow(unsafe_code)]
pub fn flush_subnormals<R>(work: impl FnOnce() -> R) -> R {
    let mut result = None;
    // SAFETY: the mode bits are restored when `work` ends, also by a panic. Until then the
    // compiler's model of arithmetic is wrong in one point: results below 10⁻³⁸ become 0. A value
    // may therefore differ from a constant that was folded, but no length, index or address is
    // computed from floating-point numbers of that size: those kept as the bits of `f32` are only moved.
    unsafe {
        no_denormals::no_denormals(|| result = Some(work()));
    }
    result.expect("the closure has run")
}

#[cfg(test)]
mod tests {
    use super::flush_subnormals;
    use std::hint::black_box;

    #[test]
    fn subnormal_numbers_are_zero_inside_and_numbers_outside() {
        let half = || black_box(f32::MIN_POSITIVE) * black_box(0.5);
        assert!(half() > 0.0);
        if cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
            assert_eq!(flush_subnormals(half), 0.0);
            let elsewhere =
                || std::thread::spawn(move || black_box(f32::MIN_POSITIVE) * black_box(0.5)).join().unwrap();
            assert_eq!(flush_subnormals(elsewhere), 0.0);
        }
        assert!(half() > 0.0);
    }
}
