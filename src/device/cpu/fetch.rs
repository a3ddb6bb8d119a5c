//! Fetching of what is read or written next into a cache.

/// Elements in a cache line.
const LINE: usize = 16;

/// Asks for the lines of elements in the L2 cache.
#[inline(always)]
pub(super) fn fetch(elements: &[f32]) {
    fetch_after(elements, 0);
}

/// Asks for the lines of elements `distance` after these, which need not exist, in the L2 cache.
#[inline(always)]
pub(super) fn fetch_after(elements: &[f32], distance: usize) {
    for element in elements.iter().step_by(LINE) {
        fetch_line::<false>(std::ptr::from_ref(element).wrapping_add(distance));
    }
}

/// Asks for the lines of `len` elements from `first` on, which need not exist, in the L1 cache.
#[inline(always)]
pub(super) fn fetch_near(first: *const f32, len: usize) {
    (0..len).step_by(LINE).for_each(|at| fetch_line::<true>(first.wrapping_add(at)));
}

/// Asks for the line at an address.
#[allow(unsafe_code)]
#[inline(always)]
fn fetch_line<const NEAR: bool>(address: *const f32) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        let address = address.cast();
        // SAFETY: the instruction changes no value and cannot fault, whatever the address.
        unsafe {
            if NEAR { _mm_prefetch::<_MM_HINT_T0>(address) } else { _mm_prefetch::<_MM_HINT_T1>(address) }
        };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
