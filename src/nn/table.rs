//! The table of a model's layers.

use super::Model;

impl Model {
    /// Returns a table of the layers: the shape of a row of output, the number of parameters, the
    /// operations of a row's forward pass, and the memory of a row that is kept for the backward pass, in
    /// bytes of `f32` values.
    pub fn table(&self) -> String {
        let mut rows =
            vec![["layer", "", "output", "parameters", "operations", "bytes kept"].map(String::from)];
        let mut sums = [0_usize; 3];
        for (at, layer) in self.layers.iter().enumerate() {
            let tensors = &self.tensors[layer.tensors.clone()];
            let own = tensors.iter().filter(|_| !layer.is_tied());
            let num_parameters = own.map(|tensor| tensor.num_elements()).sum();
            let kept = size_of::<f32>().saturating_mul(layer.output_len().saturating_add(layer.saved_len()));
            let numbers = [num_parameters, layer.operations(), kept];
            sums.iter_mut().zip(numbers).for_each(|(sum, number)| *sum = sum.saturating_add(number));
            let name = tensors.first().and_then(|tensor| tensor.name.rsplit_once('.'));
            let name = name.map_or(String::new(), |(name, _)| format!(" {name}"));
            let [parameters, operations, kept] = numbers.map(|number| number.to_string());
            let words = format!("{}{name}", layer.words());
            rows.push([at.to_string(), words, layer.output().to_string(), parameters, operations, kept]);
        }
        let [parameters, operations, kept] = sums.map(|number| number.to_string());
        rows.push([String::new(), "in all".into(), String::new(), parameters, operations, kept]);
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..6).map(width).collect();
        let line = |row: &[String; 6]| {
            let cell = |column: usize| match column {
                1 | 2 => format!("{:<1$}", row[column], widths[column]),
                _ => format!("{:>1$}", row[column], widths[column]),
            };
            (0..6).map(cell).collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}
