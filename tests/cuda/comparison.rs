//! The comparison of an operation's arrays on the GPU with the CPU's.

use std::cell::RefCell;

use phalanx::device::{Cpu, Cuda, Device, Role};

use super::operations::Operation;
use super::support::soak;

/// Returns reproducible numbers in −1..1.
pub fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32) - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// An array of an operation, with its initial content and its role.
#[derive(Clone)]
pub struct Array(pub Vec<f32>, pub Role);

pub fn given(values: Vec<f32>) -> Array {
    Array(values, Role::Activations)
}

pub fn weights(values: Vec<f32>) -> Array {
    Array(values, Role::Parameters)
}

pub fn exact(values: Vec<f32>) -> Array {
    Array(values, Role::Exact)
}

/// Returns poisoned memory for activations.
pub fn output(len: usize) -> Array {
    given(vec![f32::NAN; len])
}

/// Buffers on a device, and the views that operations take.
struct Bench<'d, D: Device> {
    device: &'d D,
    buffers: Vec<D::Buffer>,
    lengths: Vec<usize>,
}

impl<'d, D: Device> Bench<'d, D> {
    fn new(device: &'d D, arrays: &[Array]) -> Bench<'d, D> {
        let mut buffers = Vec::new();
        for Array(values, role) in arrays {
            let mut buffer = device.allocate(values.len(), *role).unwrap();
            let into = device.view_mut(&mut buffer, 0..values.len());
            device
                .write(into, &mut |memory| {
                    memory.copy_from_slice(values);
                    Ok(())
                })
                .unwrap();
            buffers.push(buffer);
        }
        Bench { device, buffers, lengths: arrays.iter().map(|Array(values, _)| values.len()).collect() }
    }

    fn values(&self) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        for (buffer, len) in self.buffers.iter().zip(&self.lengths) {
            self.device
                .read(self.device.view(buffer, 0..*len), &mut |values| {
                    all.push(values.to_vec());
                    Ok(())
                })
                .unwrap();
        }
        all
    }
}

thread_local! {
    /// The first difference of each array from the CPU's, and the operations whose repetitions have other
    /// bits.
    pub static DIFFERENCES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

fn note_difference(difference: String) {
    // at once, in case an operation ends the process
    eprintln!("{difference}");
    DIFFERENCES.with_borrow_mut(|all| all.push(difference));
}

fn bits(arrays: &[Vec<f32>]) -> Vec<u32> {
    arrays.iter().flatten().map(|value| value.to_bits()).collect()
}

/// Returns what `operation` makes of `arrays` on a device: the same bits every time, whatever another
/// operation has left in memory, and in whichever order blocks run.
fn on<D: Device>(what: &str, device: &D, arrays: &[Array], operation: &impl Operation) -> Vec<Vec<f32>> {
    let run = || {
        let mut bench = Bench::new(device, arrays);
        operation.run(device, &mut bench.buffers, &bench.lengths);
        bench.values()
    };
    let first = run();
    for _ in 1..soak().map_or(2, |long| 10 * long) {
        if bits(&run()) != bits(&first) {
            note_difference(format!("{what}: a repetition has other bits"));
            break;
        }
    }
    first
}

/// Checks that two operations leave the same bits in all arrays.
pub fn same_bits(what: &str, cuda: &Cuda, arrays: &[Array], operations: [&impl Operation; 2]) {
    let [one, other] = operations.map(|operation| bits(&on(what, cuda, arrays, operation)));
    assert_eq!(one, other, "{what}");
}

/// Runs `operation` on both devices and compares every array, relative to its largest value.
pub fn compare(what: &str, cuda: &Cuda, tolerance: f32, arrays: &[Array], operation: &impl Operation) {
    // inputs have no more digits than the GPU keeps, so that the operations are compared, not the
    // inputs
    let keep = |role| if tolerance > 5e-3 && role != Role::Exact { 0xffff_0000 } else { u32::MAX };
    let cut = |Array(values, role): &Array| {
        let values = values.iter().map(|value| f32::from_bits(value.to_bits() & keep(*role))).collect();
        Array(values, *role)
    };
    let arrays = &arrays.iter().map(cut).collect::<Vec<_>>();
    let expected = on(what, &Cpu::new(1).unwrap(), arrays, operation);
    let found = on(what, cuda, arrays, operation);
    for (array, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let largest = expected.iter().fold(1e-3_f32, |largest, value| largest.max(value.abs()));
        for (i, (f, e)) in found.iter().zip(expected).enumerate() {
            let is_same = f == e || f.is_nan() && e.is_nan() || (f - e).abs() <= tolerance * largest;
            if !is_same {
                let found = format!("element {i} is {f}, not {e} (largest {largest})");
                note_difference(format!("{what}: array {array}, {found}"));
                break;
            }
        }
    }
}

/// Returns what a sum has at first.
pub fn before(len: usize, accumulate: bool) -> Vec<f32> {
    if accumulate { random(len, 5) } else { vec![f32::NAN; len] }
}
