"""The files for TensorFlow Serving are what it reads, and name all models that are there."""

from tfdist.serving.model_server import write_configs


def test_all_models_with_a_version_are_listed(tmp_path):
    for name in ("digits/1", "text/2", "text/3", "unfinished/.partial-1", ".hidden/1"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "saved_model.pb").touch()
    write_configs(tmp_path)
    lines = (tmp_path / "models.config").read_text().split("\n")
    assert [line.strip() for line in lines if "name" in line or "path" in line] == [
        'name: "digits"',
        'base_path: "/models/digits"',
        'name: "text"',
        'base_path: "/models/text"',
    ]


def test_what_someone_has_changed_in_the_batching_stays(tmp_path):
    write_configs(tmp_path)
    assert "max_batch_size { value: 32 }" in (tmp_path / "batching.config").read_text()
    (tmp_path / "batching.config").write_text("max_batch_size { value: 8 }\n")
    write_configs(tmp_path)
    assert (tmp_path / "batching.config").read_text() == "max_batch_size { value: 8 }\n"
