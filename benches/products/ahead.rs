//! Fetching of what is read next into the second cache, while a product is computed.
//!
//! A large operand comes from memory in pieces that are too short or too many for the processor's
//! own prefetcher. Without this, packing runs at a quarter of the memory's rate.

/// Elements in a cache line.
const LINE: usize = 16;

/// A block of a matrix, of which a line is fetched at a time.
#[derive(Clone, Copy)]
pub struct Ahead<'a> {
    values: &'a [f32],
    /// Elements of a row of the block, and from a row to the next.
    run: usize,
    stride: usize,
    /// The next element, and the end of its row.
    at: usize,
    end: usize,
}

impl<'a> Ahead<'a> {
    /// Returns the block of rows of `run` elements, `stride` apart, that begins with `values`.
    pub fn new(values: &'a [f32], run: usize, stride: usize) -> Ahead<'a> {
        Ahead { values, run, stride, at: 0, end: run }
    }

    /// Fetches the next line, if there is one left.
    #[inline(always)]
    pub fn fetch(&mut self) {
        if let Some(element) = self.values.get(self.at) {
            fetch(element);
            self.at += LINE;
            if self.at >= self.end {
                self.at = self.end - self.run + self.stride;
                self.end += self.stride;
            }
        }
    }
}

/// Fetches a run of elements.
#[inline(always)]
pub fn fetch_run(elements: &[f32]) {
    elements.iter().step_by(LINE).for_each(fetch);
}

/// Asks for the cache line of `element`.
#[allow(unsafe_code)]
#[inline(always)]
fn fetch(element: &f32) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: the instruction changes no value and cannot fault; the address is that of a live
        // element.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(element).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = element;
}
