//! `--tuned-products`: what is measured is kept, used again, and refused where it does not fit.

use std::fs;

use phalanx::device::ProductTable;

use crate::support::{Done, directory, program};
use crate::{emulator, job};

const RUN: &str = "--model deep-mlp --width 64 --layers 3 --data synthetic --batch-size 32 --steps 4 \
                   --eval-every 0 --threads 1 --precision bf16 --device cuda";

/// Runs a program with `products` algorithms for each product; returns its end and the numbers of times that
/// cuBLASLt was asked for algorithms, and whether it takes one of the table.
fn run(
    (ranks, name): (usize, &str),
    libraries: &'static str,
    products: usize,
    file: &str,
    code: i32,
) -> (Done, [u64; 2]) {
    let (_directory, path) = directory();
    let (log, logged) = (format!("{path}/log"), format!("{path}/log"));
    let done = job(ranks, name, &format!("{RUN} --tuned-products {file}"))
        .libraries(Some(libraries))
        .env("PHALANX_EMULATED_CUDA", move || format!("products={products}"))
        .env("PHALANX_EMULATED_CUDA_LOG", move || log.clone())
        .run()
        .expect(code);
    let text = fs::read_to_string(logged).unwrap_or_default();
    let calls = |function: &str| {
        let counts = text.lines().filter_map(|line| line.split_once(&format!("{function} calls=")));
        counts.map(|(_, count)| count.trim().parse::<u64>().expect("a count is a number")).sum()
    };
    let counts = ["cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoCheck"].map(calls);
    (done, counts)
}

fn read(path: &str) -> ProductTable {
    serde_json::from_str(&fs::read_to_string(path).expect("the file can be read")).expect("it is a table")
}

#[test]
fn the_fastest_products_are_kept_and_used_again() {
    let Some(libraries) = emulator() else { return };
    let (_directory, path) = directory();
    for start in [(1, "sync_sgd"), (3, "sync_sgd"), (2, "tensor_mlp"), (3, "pipeline")] {
        let file = format!("{path}/{}{}.json", start.1, start.0);
        let (first, [asked, used]) = run(start, libraries, 3, &file, 0);
        let table = read(&file);
        first.says_once(&format!("measured {0} matrix products for {file}: {0} are faster", table.len()));
        assert!(used >= table.len() as u64, "the step uses the table at once: {used}");
        for (name, product) in &table {
            assert!(name.starts_with("emulated cuda device 0, cublaslt 120900, bf16: "), "{name}");
            assert_eq!(product.num_measured, 3, "{name}");
            assert!(product.microseconds_of_first > 2000.0, "the first one sleeps: {name} {product:?}");
            assert!(product.microseconds < product.microseconds_of_first, "{name} {product:?}");
            let number = product.algorithm.split(' ').nth(1).expect("an algorithm has eight words");
            assert_ne!(number, "0000000000000000", "another than the first is chosen: {product:?}");
        }
        let (again, [asked_again, _]) = run(start, libraries, 3, &file, 0);
        again.says_once(&format!("all matrix products of a step are in {file}"));
        // what is left to ask for are the products of the evaluation
        let num_known = table.len() as u64;
        assert!(asked >= asked_again + 2 * num_known, "{asked} then {asked_again}, {num_known} in the table");
        assert_eq!(read(&file), table);
        assert_eq!(again.digest(), first.digest(), "the emulator's algorithms have the same sums");
        // a library without these algorithms has its products measured again
        let (other, _) = run(start, libraries, 1, &file, 0);
        other.says_once(&format!("measured {} matrix products", table.len()));
        assert!(read(&file).values().all(|product| product.num_measured == 1));
    }
}

#[test]
fn a_file_that_is_no_table_is_refused() {
    let Some(libraries) = emulator() else { return };
    let (_directory, path) = directory();
    let file = format!("{path}/products.json");
    for text in ["{", "[]", r#"{"a product": {"algorithm": "0"}}"#, r#"{"a product": 3}"#] {
        fs::write(&file, text).expect("the file can be written");
        let (done, _) = run((2, "sync_sgd"), libraries, 1, &file, 2);
        done.says_once(&format!("reading tuned products from {file}: "));
        done.says_once("give the name of a new file, or of one of an earlier run");
        assert_eq!(fs::read_to_string(&file).expect("the file can be read"), text, "it is left alone");
    }
    // products of other devices and libraries stay in the file
    let times = r#""microseconds": 1, "microseconds_of_first": 2"#;
    let other = format!(r#"{{"another": {{"algorithm": "0", {times}, "num_measured": 3}}}}"#);
    fs::write(&file, other).expect("the file can be written");
    run((1, "sync_sgd"), libraries, 1, &file, 0);
    let table = read(&file);
    assert!(table.len() > 1 && table["another"].num_measured == 3, "{table:?}");

    let arguments = format!("--model mlp --steps 1 --tuned-products {file}");
    let done = crate::support::mpiexec(2, program("sync_sgd")).args(arguments.split_whitespace());
    done.run().expect(2).says_once("the CPU has one algorithm, and --device is cpu");
}
