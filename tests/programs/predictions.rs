//! `predict`: PyTorch's numbers for PyTorch's weights, the scores of a run's own evaluation, the same bytes
//! on any number of ranks, and its answers to data that do not fit.

use std::fs;
use std::path::Path;

use crate::support::equivalence::Oracle;
use crate::support::{Done, data, directory, mpiexec};
use ndarray::{Array1, Array2, ArrayD, Axis};
use phalanx::checkpoint::{self, Contents, Description, StateSource};
use phalanx::nn::Model;
use serde_json::Value;

fn predict(ranks: usize, arguments: &str) -> Done {
    let job = mpiexec(ranks, env!("CARGO_BIN_EXE_predict")).args(["--threads", "1", "--quiet"]);
    job.args(arguments.split_whitespace()).without_grace().run()
}

fn train(ranks: usize, arguments: &str) -> Value {
    let job = mpiexec(ranks, env!("CARGO_BIN_EXE_sync_sgd")).args(["--threads", "1", "--quiet"]);
    job.args(arguments.split_whitespace()).run().expect(0).result()
}

/// The initial weights of an oracle.
struct Weights(Vec<Vec<f32>>);

impl StateSource for Weights {
    fn read(&mut self, write: &mut dyn FnMut(&[f32]) -> std::io::Result<()>) -> std::io::Result<()> {
        self.0.iter().try_for_each(|values| write(values))
    }
}

/// PyTorch's weights, inputs and outputs.
struct Torch {
    file: hdf5::File,
    model: Model,
}

impl Torch {
    fn open(name: &str) -> Torch {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/oracles");
        let file = hdf5::File::open(folder.join(format!("{name}.h5"))).unwrap();
        Torch { file, model: Oracle::open(name).model() }
    }

    fn read(&self, name: &str) -> ArrayD<f64> {
        self.file.dataset(name).unwrap().read_dyn().unwrap()
    }

    /// Writes the initial weights as --export would, of a network that was trained with `tokens`.
    fn export(&self, path: &str, tokens: Option<&str>) {
        let setting = |name: &str, value: &str| (name.to_owned(), Value::from(value));
        let inputs = setting("inputs", &self.model.input.to_string());
        let description = Description {
            model: self.model.name.clone(),
            config: std::iter::once(inputs).chain(tokens.map(|tokens| setting("tokens", tokens))).collect(),
            network: Some(self.model.text.clone()),
            standardise: Some(Vec::new()),
            ..Description::default()
        };
        let values = |name: &str| self.read(&format!("initial/{name}")).mapv(|value| value as f32);
        let tensors = self.model.tensors.iter().map(|tensor| values(&tensor.name).into_iter().collect());
        let contents = Contents::new(&self.model.tensors, &[], description);
        let mut weights = Weights(tensors.collect());
        checkpoint::write(Path::new(path), &contents, &mut weights, &mut |_| ()).unwrap();
    }
}

/// Reads a dataset of a file of predictions.
fn read(path: &str, name: &str) -> ArrayD<f64> {
    hdf5::File::open(path).unwrap().dataset(name).unwrap().read_dyn().unwrap()
}

#[track_caller]
fn assert_close(what: &str, found: &[f64], expected: &[f64]) {
    let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs() / largest;
        assert!(off < 1e-5, "{what}: number {at} is {found}, and PyTorch's is {expected}");
    }
}

/// Returns the cross-entropy and the likeliest class.
fn cross_entropy(outputs: &[f64], class: usize) -> (f64, usize) {
    let best = (0..outputs.len()).max_by(|one, other| outputs[*one].total_cmp(&outputs[*other])).unwrap();
    let sum: f64 = outputs.iter().map(|output| (output - outputs[best]).exp()).sum();
    (sum.ln() + outputs[best] - outputs[class], best)
}

fn floats(value: &Value) -> Vec<f64> {
    let values = value.as_array().map_or_else(|| vec![value.clone()], Clone::clone);
    values.iter().map(|value| value.as_f64().unwrap()).collect()
}

/// Predicts `data` with `network` on 1 to 4 ranks, compares the files and the results, and returns the
/// result; the file of one rank is `OUTPUT1.h5`.
fn everywhere(network: &str, data: &str, output: &str) -> Value {
    let mut first: Option<Value> = None;
    for ranks in 1..=4 {
        let file = format!("{output}{ranks}.h5");
        let mut result = predict(ranks, &format!("{network} {data} --output {file}")).expect(0).result();
        let parts = result.as_object_mut().unwrap();
        assert_eq!(parts.remove("ranks"), Some(ranks.into()));
        parts.remove("samples_per_second");
        let first = first.get_or_insert_with(|| result.clone());
        assert_eq!(result, *first, "on {ranks} ranks");
        let [own, of_one] = [&file, &format!("{output}1.h5")].map(|path| fs::read(path).unwrap());
        assert!(own == of_one, "{output} on {ranks} ranks has other bytes");
    }
    first.unwrap()
}

#[test]
fn pytorch_has_these_outputs() {
    let (_directory, folder) = directory();
    let names = [
        "classifier_relu_sgd",
        "regressor_tanh_adam_cosine",
        "deep_mlp_gelu_adamw",
        "residual_mlp_adam",
        "residual_conv_sgd",
        "lenet_sgd",
    ];
    for name in names {
        let torch = Torch::open(name);
        let [network, samples, output] =
            ["net.h5", "data.h5", ""].map(|kind| format!("{folder}/{name}{kind}"));
        torch.export(&network, None);
        let outputs = torch.read("f64/first_output").into_dimensionality::<ndarray::Ix2>().unwrap();
        let (num, width) = outputs.dim();
        let file = hdf5::File::create(&samples).unwrap();
        let inputs = torch.read("input/0/x").mapv(|value| value as f32);
        file.new_dataset_builder().with_data(&inputs).create("x").unwrap();
        let targets = torch.file.link_exists("input/0/y").then(|| torch.read("input/0/y"));
        match &targets {
            Some(targets) if targets.ndim() == 1 => {
                let classes = targets.mapv(|class| class as i64);
                file.new_dataset_builder().with_data(&classes).create("y").unwrap();
            }
            Some(targets) => {
                file.new_dataset_builder().with_data(targets).create("y").unwrap();
            }
            None => {}
        }
        file.close().unwrap();
        let result = everywhere(&network, &format!("--data {samples}"), &output);
        assert_eq!(result["samples"], num);
        let found = format!("{output}1.h5");
        let rows = |array: ArrayD<f64>| array.into_iter().collect::<Vec<f64>>();
        let expected: Vec<f64> = outputs.iter().copied().collect();
        assert_close(name, &rows(read(&found, "outputs")), &expected);
        let row = |at: usize| &expected[at * width..][..width];
        let mean_of_squares = |values: &mut dyn Iterator<Item = f64>| {
            values.map(|value| value * value).sum::<f64>() / width as f64
        };
        let losses: Vec<f64> = match &targets {
            None => (0..num).map(|at| mean_of_squares(&mut row(at).iter().copied())).collect(),
            Some(targets) if targets.ndim() == 1 => {
                let of_sample = |at: usize| cross_entropy(row(at), targets[[at]] as usize);
                let (losses, classes): (Vec<f64>, Vec<usize>) = (0..num).map(of_sample).unzip();
                let best: Vec<f64> = classes.iter().map(|class| *class as f64).collect();
                assert_eq!(rows(read(&found, "classes")), best);
                let is_right = |at: usize| f64::from(u8::from(classes[at] as f64 == targets[[at]]));
                let right = (0..num).map(is_right).sum::<f64>() / num as f64;
                assert_eq!(result["accuracy"], right);
                for score in result["classes"].as_array().unwrap() {
                    let class = score["class"].as_f64().unwrap();
                    let of_class: Vec<usize> = (0..num).filter(|at| targets[[*at]] == class).collect();
                    let right = of_class.iter().map(|at| is_right(*at)).sum::<f64>();
                    assert_eq!(score["num"], of_class.len());
                    assert_eq!(score["accuracy"], right / of_class.len() as f64);
                }
                losses
            }
            Some(targets) => {
                let (mut errors, mut squares) = (vec![0.0; width], vec![0.0; width]);
                for column in 0..width {
                    let target = |at: usize| f64::from(targets[[at, column]] as f32);
                    let mean = (0..num).map(target).sum::<f64>() / num as f64;
                    for at in 0..num {
                        errors[column] += (row(at)[column] - target(at)).powi(2);
                        squares[column] += (target(at) - mean).powi(2);
                    }
                }
                let r2: Vec<f64> =
                    errors.iter().zip(&squares).map(|(error, all)| 1.0 - error / all).collect();
                let [errors, squares] = [errors, squares].map(|sums| sums.iter().sum::<f64>());
                assert_close("R²", &floats(&result["r2_of_outputs"]), &r2);
                assert_close("R²", &floats(&result["r2"]), &[1.0 - errors / squares]);
                let mean = errors / (num * width) as f64;
                assert_close("the mean squared error", &floats(&result["mean_squared_error"]), &[mean]);
                let of_sample = |at: usize| {
                    let differences = (0..width).map(|column| row(at)[column] - targets[[at, column]]);
                    mean_of_squares(&mut { differences })
                };
                (0..num).map(of_sample).collect()
            }
        };
        assert_close("losses", &rows(read(&found, "losses")), &losses);
        let mean = losses.iter().sum::<f64>() / num as f64;
        assert_close("the loss", &floats(&result["loss"]), &[mean]);
    }
}

#[test]
fn pytorch_predicts_these_tokens() {
    let (_directory, folder) = directory();
    for (name, num_tokens) in [("gpt_bias_adamw", 17), ("gpt_nobias_decay_clip", 29)] {
        let torch = Torch::open(name);
        let network = format!("{folder}/{name}.h5");
        torch.export(&network, Some(&format!("numbers:{num_tokens}")));
        let [inputs, targets] = ["input/0/x", "input/0/y"].map(|name| torch.read(name));
        let outputs = torch.read("f64/first_output");
        let len = inputs.shape()[1];
        for sample in 0..2 {
            // a text of one sample: its tokens and the one after
            let tokens = (0..len).map(|at| inputs[[sample, at]]).chain([targets[[sample, len - 1]]]);
            let bytes: Vec<u8> = tokens.flat_map(|token| (token as u16).to_le_bytes()).collect();
            let (text, output) = (format!("{folder}/{sample}.bin"), format!("{folder}/{name}{sample}-"));
            fs::write(&text, bytes).unwrap();
            let result = everywhere(&network, &format!("--data {text} --logits"), &output);
            let logits: Vec<f64> = outputs.index_axis(Axis(0), sample).iter().copied().collect();
            let of_position = |at: usize| {
                cross_entropy(&logits[at * num_tokens..][..num_tokens], targets[[sample, at]] as usize)
            };
            let (losses, classes): (Vec<f64>, Vec<usize>) = (0..len).map(of_position).unzip();
            let found = format!("{output}1.h5");
            let found = ["losses", "classes", "outputs"].map(|name| read(&found, name));
            assert_eq!((found[0].shape(), found[2].shape()), (&[1, len][..], &[1, len, num_tokens][..]));
            assert_close("losses", found[0].as_slice().unwrap(), &losses);
            let classes: Vec<f64> = classes.iter().map(|class| *class as f64).collect();
            assert_eq!(found[1].as_slice().unwrap(), classes);
            assert_close("logits", found[2].as_slice().unwrap(), &logits);
            let mean = losses.iter().sum::<f64>() / len as f64;
            assert_close("the loss", &floats(&result["loss"]), &[mean]);
        }
    }
}

/// Writes 90 rows of numbers that are far from 0, shifted by `shift`, in packed chunks of 7.
fn far_table(path: &str, shift: f32) {
    let (x, y) = data::rows(90);
    let file = hdf5::File::create(path).unwrap();
    let x = x.mapv(|value| 50.0 * value + 300.0 + shift);
    file.new_dataset_builder().with_data(&x).chunk([7, 6]).deflate(4).create("x").unwrap();
    file.new_dataset_builder().with_data(&y).chunk([7]).deflate(4).create("y").unwrap();
}

#[test]
fn a_run_scores_its_test_samples_alike() {
    let (_directory, folder) = directory();
    let [train_data, test_data, network] = ["a.h5", "b.h5", "net.h5"].map(|name| format!("{folder}/{name}"));
    far_table(&train_data, 0.0);
    far_table(&test_data, 20.0);
    let run = train(
        2,
        &format!(
            "--data {train_data} --test-data {test_data} --model mlp --hidden 8 --epochs 5 --batch-size 16 \
             --standardise features --export {network}"
        ),
    );
    let close = |found: &Value, expected: &Value| {
        let [found, expected] = [found, expected].map(|value| value.as_f64().unwrap());
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} is not {expected}");
    };
    let exported = hdf5::File::open(&network).unwrap().attr("loss").unwrap().read_scalar::<f64>().unwrap();
    close(&Value::from(exported), &run["loss"]);
    // the means and deviations are those of the training samples, though none are read
    let alone = everywhere(&network, &format!("--data {test_data}"), &format!("{folder}/alone"));
    close(&alone["loss"], &run["test_loss"]);
    assert_eq!((&alone["accuracy"], alone["samples"].as_u64()), (&run["accuracy"], Some(90)));
    // files that are one set, and a part of a set, are in the order of the samples
    let both = format!("--data {folder}/[ab].h5");
    let all = everywhere(&network, &both, &format!("{folder}/all"));
    let part = format!("{both} --test-fraction 0.5 --part test");
    let part = everywhere(&network, &part, &format!("{folder}/part"));
    close(&part["loss"], &alone["loss"]);
    assert_eq!(all["samples"], 180);
    let [all, part, alone] = ["all1", "part1", "alone1"].map(|name| {
        let outputs = read(&format!("{folder}/{name}.h5"), "outputs");
        outputs.as_slice().unwrap().to_vec()
    });
    assert!(part == alone && all[90 * 3..] == alone, "outputs of the same samples differ");

    let network = format!("{folder}/digits.h5");
    let run = train(2, &format!("--steps 20 --export {network}"));
    let scored = predict(3, &format!("{network} --part test")).expect(0).result();
    close(&scored["loss"], &run["test_loss"]);
    assert_eq!(scored["accuracy"], run["accuracy"]);
}

#[test]
fn samples_need_no_targets() {
    let (_directory, folder) = directory();
    let [table, bare, network] = ["a.h5", "bare.h5", "net.h5"].map(|name| format!("{folder}/{name}"));
    far_table(&table, 0.0);
    train(1, &format!("--data {table} --model mlp --hidden 4 --epochs 1 --export {network}"));
    let x: Array2<f32> = hdf5::File::open(&table).unwrap().dataset("x").unwrap().read_2d().unwrap();
    let file = hdf5::File::create(&bare).unwrap();
    file.new_dataset_builder().with_data(&x).create("x").unwrap();
    file.new_dataset_builder().with_data(&Array1::from(vec![7_i64; 90])).create("sevens").unwrap();
    file.new_dataset_builder().with_data(&x.column(0).to_owned()).create("values").unwrap();
    file.close().unwrap();
    let result = everywhere(&network, &format!("--data {bare}"), &format!("{folder}/out"));
    assert!(result["loss"].is_null() && result["accuracy"].is_null(), "{result}");
    let out = hdf5::File::open(format!("{folder}/out1.h5")).unwrap();
    assert_eq!(out.member_names().unwrap(), ["classes", "outputs"]);

    let refused = |arguments: &str, why: &str| {
        for ranks in [1, 3] {
            predict(ranks, &format!("{network} {arguments}")).expect(2).says_once(why);
        }
    };
    refused(&format!("--data {bare} --targets /y"), "it has no dataset /y; its datasets: /sevens");
    refused(
        &format!("--data {bare} --targets /sevens"),
        "is class 7, and the network has outputs for classes 0 to 2",
    );
    refused(
        &format!("--data {bare} --targets /values"),
        "for each sample the network predicts one of 3 classes, but the targets are one real value a sample",
    );
    let misfit =
        "the network was trained with 6 features, but the samples are images of 28 × 28 with 1 channel";
    refused("", misfit);
    refused(&format!("--data {table} --part test"), "has no samples to test with; --test-fraction or");
    refused(&format!("--data {table} --output {folder}/no/out.h5"), "give --output a file in a directory");
    refused(&format!("--data {table} --output {table}"), "is the same file");
    refused("--inputs /z", "--inputs: it has no effect in this run");
    refused(
        &format!("--data {table} --output {folder}/out.h5 --logits"),
        "--logits: it has no effect in this run: of samples with one prediction, all outputs are written",
    );
    refused(
        &format!("--data {table} --test-fraction 0.2"),
        "--test-fraction: it has no effect in this run: it is for --part train and test",
    );
    for ranks in [1, 3] {
        predict(ranks, &format!("{folder}/none.h5")).expect(2).says_once("No such file or directory");
        predict(ranks, &table).expect(2).says_once("it has no group /model");
    }
    let left: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().ends_with(".tmp")), "{left:?}");
}
