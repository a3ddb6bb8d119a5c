//! Tests of datasets in memory, of generated ones, and of their statistics.

use std::cell::RefCell;
use std::rc::Rc;

use super::*;
use crate::nn::Features;

fn read(set: &mut dyn Dataset, samples: &[usize]) -> (Vec<f32>, Vec<f32>) {
    let mut inputs = vec![f32::NAN; samples.len() * set.features().len()];
    let mut targets = vec![f32::NAN; samples.len() * set.targets().len()];
    set.read(samples, &mut inputs, &mut targets).unwrap();
    (inputs, targets)
}

fn table() -> Table {
    Table {
        source: "a test".into(),
        features: Features::Flat(3),
        targets: Targets::Values(2),
        inputs: (0..30).map(|i| i as f32).collect(),
        target_values: (0..20).map(|i| -(i as f32)).collect(),
    }
}

/// All that a pass can compute.
const ALL: WantedStatistics = WantedStatistics { moments: true, checksum: true, finite: true };

#[test]
fn samples_come_in_the_order_asked_for() {
    let (inputs, targets) = read(&mut table(), &[2, 0, 2]);
    assert_eq!(inputs, [6.0, 7.0, 8.0, 0.0, 1.0, 2.0, 6.0, 7.0, 8.0]);
    assert_eq!(targets, [-4.0, -5.0, 0.0, -1.0, -4.0, -5.0]);
    let whole = Rc::new(RefCell::new(table()));
    let mut part = Subset::new(Rc::clone(&whole), 2..5);
    assert_eq!((part.num_samples(), part.source().as_str()), (3, "a test"));
    assert_eq!(read(&mut part, &[2, 0]).0, [12.0, 13.0, 14.0, 6.0, 7.0, 8.0]);
}

#[test]
fn bytes_of_images_come_as_0_to_1() {
    let features = Features::Image { height: 1, width: 2, channels: 1 };
    let images = |labels: Vec<u8>| ByteImages {
        source: "a test".into(),
        label_source: "its labels".into(),
        features,
        pixels: vec![0, 255, 51, 102],
        labels,
        num_classes: 10,
        preset: vec![[0.5, 0.5]],
    };
    assert_eq!(
        read(&mut images(vec![3, 9]), &[1, 0]),
        (vec![51.0 / 255.0, 102.0 / 255.0, 0.0, 1.0], vec![9.0, 3.0])
    );
    assert!(images(vec![3]).checked().is_err() && images(vec![3, 10]).checked().is_err());
}

#[test]
fn the_embedded_digits_are_there() {
    let Data { train, test } = open_digits().unwrap();
    let mut test = test.unwrap();
    assert_eq!((train.num_samples(), test.num_samples()), (9000, 1000));
    let leaves = 0..leaves(&*test).num_blocks();
    let statistics = Statistics::gather(&mut *test, leaves, ALL, &mut || ()).unwrap();
    let [mean, deviation] = statistics.moments.total().unwrap().pairs()[0];
    assert!((mean - 0.1307).abs() < 5e-3 && (deviation - 0.3081).abs() < 5e-3, "{mean} {deviation}");
    assert_eq!(statistics.largest_label, 9.0);
}

#[test]
fn statistics_of_parts_add_up_and_standardise() {
    // 4096 samples to a leaf
    let mut set = Synthetic::new(Features::Flat(5), Targets::Classes(4), 0, 30_000, 1);
    let num_leaves = leaves(&set).num_blocks();
    assert_eq!(num_leaves, 8);
    let mut gather = |leaves| Statistics::gather(&mut set, leaves, ALL, &mut || ()).unwrap();
    let whole = gather(0..num_leaves);
    let mut sum = MomentTree::default();
    let mut checksum = 0;
    for leaves in [0..3, 3..3, 3..4, 4..8] {
        let part = gather(leaves);
        sum.append(part.moments);
        checksum += part.checksum[1];
    }
    assert_eq!((sum, checksum), (whole.moments, whole.checksum[1]));

    // a feature that never changes is only shifted
    let mut set = table();
    set.inputs.iter_mut().step_by(3).for_each(|value| *value = 7.0);
    let moments =
        Statistics::gather(&mut set, 0..1, ALL, &mut || ()).unwrap().moments.total().unwrap().pairs();
    assert_eq!(moments[0], [7.0, 1.0]);
    let sampler = Sampler::new(10, 10, Order::Sequential, 0);
    let mut batches = Batches::new(Box::new(set), sampler, Some(Standardise::new(&moments)));
    let (mut inputs, mut targets) = (vec![0.0; 30], vec![0.0; 20]);
    batches.read(0, 0..10, &mut inputs, &mut targets).unwrap();
    for feature in 0..3 {
        let column = || inputs.iter().skip(feature).step_by(3);
        let mean = column().sum::<f32>() / 10.0;
        let variance = column().map(|value| (value - mean).powi(2)).sum::<f32>() / 10.0;
        assert!(mean.abs() < 1e-6 && (variance - f32::from(feature > 0)).abs() < 1e-5, "{mean} {variance}");
    }
}

#[test]
fn synthetic_samples_depend_on_their_number_only() {
    let features = Features::Image { height: 4, width: 5, channels: 2 };
    let mut all = Synthetic::new(features, Targets::Classes(3), 0, 400, 9);
    let mut later = Synthetic::new(features, Targets::Classes(3), 100, 300, 9);
    let mut kept = Synthetic::open(features, Targets::Classes(3), 0, 400, 9).unwrap();
    assert_eq!(read(&mut all, &[107, 399]), read(&mut later, &[7, 299]));
    assert_eq!(read(&mut all, &[107, 399]), read(&mut *kept, &[107, 399]));
    let mut other = Synthetic::new(features, Targets::Classes(3), 0, 400, 10);
    assert_ne!(read(&mut all, &[0]).0, read(&mut other, &[0]).0);
    let (_, labels) = read(&mut all, &(0..400).collect::<Vec<_>>());
    assert!((0..3).all(|class| labels.iter().filter(|label| **label == class as f32).count() > 20));
}

#[test]
fn numbers_that_are_not_finite_or_exceed_the_range_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.h5");
    // the last value of the first channel of an image of two, which is the last but one in memory
    for (value, why) in [
        (f64::NAN, "x holds NaN at row 2, element 4; every number must be finite"),
        (f64::INFINITY, "x holds inf at row 2, element 4; every number must be finite"),
        (-1e300, "x holds -1e300 at row 2, element 4, which exceeds the range of 32 bits, ±3.4028235e38"),
    ] {
        let file = ::hdf5::File::create(&path).unwrap();
        let mut images = ndarray::Array4::<f64>::ones((5, 2, 1, 3));
        images[[2, 0, 0, 2]] = value;
        file.new_dataset_builder().with_data(&images).create("x").unwrap();
        drop(file);
        let names = Hdf5Names { inputs: "x".into(), targets: None, may_lack_targets: false };
        let mut set = Hdf5Set::open("a test", std::slice::from_ref(&path), &names).unwrap();
        let mut inputs = [0.0; 6];
        set.read(&[1], &mut inputs, &mut []).unwrap();
        let error = set.read(&[2], &mut inputs, &mut []).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn rows_of_a_file_come_in_any_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.h5");
    let file = ::hdf5::File::create(&path).unwrap();
    let images =
        ndarray::Array4::from_shape_fn((50, 3, 4, 5), |(n, c, y, x)| (n * 60 + c * 20 + y * 5 + x) as f32);
    file.new_dataset_builder().with_data(&images).chunk((7, 3, 4, 5)).deflate(1).create("x").unwrap();
    let values = ndarray::Array2::from_shape_fn((50, 2), |(n, i)| (n * 2 + i) as f64);
    file.new_dataset_builder().with_data(&values).create("y").unwrap();
    drop(file);

    let names = Hdf5Names { inputs: "x".into(), targets: Some("y".into()), may_lack_targets: false };
    let mut set = Hdf5Set::open("a test", std::slice::from_ref(&path), &names).unwrap();
    assert_eq!((set.row_format().bytes(), set.num_samples()), (4 * 60 + 16, 50));
    assert_eq!(set.features(), Features::Image { height: 4, width: 5, channels: 3 });
    assert_eq!(set.targets(), Targets::Values(2));
    for samples in [vec![49, 0, 7, 8, 9, 3], vec![7, 7, 49], vec![]] {
        let rows = read(&mut set, &samples);
        for (at, sample) in samples.iter().enumerate() {
            // channels first in the file, last here
            let expected = |i: usize| (sample * 60 + i % 3 * 20 + i / 3) as f32;
            assert!((0..60).all(|i| rows.0[at * 60 + i] == expected(i)));
            assert_eq!(rows.1[at * 2..][..2], [(sample * 2) as f32, (sample * 2 + 1) as f32]);
        }
    }
}
