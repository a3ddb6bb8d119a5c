//! Vectors of the channels of images.

use pulp::Simd;

/// The chains of a sum over positions: position p is in chain p mod 4, because an addition waits for the one
/// before it in its chain.
const CHAINS: usize = 4;

/// The channels of a vector. Lanes past the last channel do not matter.
#[derive(Clone, Copy)]
pub(super) struct Block<S> {
    pub(super) simd: S,
    first: usize,
    len: usize,
    /// Elements from a position to the next.
    channels: usize,
}

impl<S: Simd> Block<S> {
    /// Returns the blocks of all channels.
    #[inline(always)]
    pub(super) fn all(simd: S, channels: usize) -> impl Iterator<Item = Block<S>> {
        let firsts = (0..channels).step_by(S::F32_LANES);
        firsts.map(move |first| Block { simd, first, len: S::F32_LANES.min(channels - first), channels })
    }

    /// Loads the channels of a position from each of the `images`.
    #[inline(always)]
    pub(super) fn load<const N: usize>(self, images: [&[f32]; N], position: usize) -> [S::f32s; N] {
        let at = position * self.channels + self.first;
        let mut vectors = [self.simd.splat_f32s(0.0); N];
        for (vector, image) in vectors.iter_mut().zip(images) {
            *vector = if self.len == S::F32_LANES {
                S::as_simd_f32s(&image[at..at + S::F32_LANES]).0[0]
            } else {
                self.simd.partial_load_f32s(&image[at..at + self.len])
            };
        }
        vectors
    }

    /// Writes the channels of a position.
    #[inline(always)]
    fn store(self, image: &mut [f32], position: usize, vector: S::f32s) {
        let at = position * self.channels + self.first;
        if self.len == S::F32_LANES {
            S::as_mut_simd_f32s(&mut image[at..at + S::F32_LANES]).0[0] = vector;
        } else {
            self.simd.partial_store_f32s(&mut image[at..at + self.len], vector);
        }
    }

    /// Adds a term to each sum.
    #[inline(always)]
    fn add<const M: usize>(self, terms: [S::f32s; M], sums: &mut [S::f32s; M]) {
        sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum = self.simd.add_f32s(*sum, term));
    }

    /// Writes sums over the positions to the channels of `sums`. The chains of every `CHAINS`
    /// positions are in registers.
    #[inline(always)]
    pub(super) fn sum<const N: usize, const M: usize>(
        self,
        images: [&[f32]; N],
        sums: &mut [&mut [f32]; M],
        term: impl Fn([S::f32s; N]) -> [S::f32s; M],
    ) {
        let mut chains = [[self.simd.splat_f32s(0.0); M]; CHAINS];
        let num_positions = images[0].len() / self.channels;
        let whole = num_positions - num_positions % CHAINS;
        for start in (0..whole).step_by(CHAINS) {
            for (at, chain) in chains.iter_mut().enumerate() {
                self.add(term(self.load(images, start + at)), chain);
            }
        }
        // a copy, because a loop of a length that is not known would keep the chains in memory
        let mut ends = chains;
        for (chain, position) in ends.iter_mut().zip(whole..num_positions) {
            self.add(term(self.load(images, position)), chain);
        }
        let [a, b, c, d] = ends;
        for (at, sums) in sums.iter_mut().enumerate() {
            let (first, second) = (self.simd.add_f32s(a[at], b[at]), self.simd.add_f32s(c[at], d[at]));
            self.store(sums, 0, self.simd.add_f32s(first, second));
        }
    }

    /// Computes each element of `output` with `function` from that of each of the `images`.
    #[inline(always)]
    pub(super) fn map<const N: usize>(
        self,
        images: [&[f32]; N],
        output: &mut [f32],
        function: impl Fn([S::f32s; N]) -> S::f32s,
    ) {
        for position in 0..output.len() / self.channels {
            self.store(output, position, function(self.load(images, position)));
        }
    }
}
