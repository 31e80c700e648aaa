CREATE TABLE access_events (
    tenant VARCHAR(96) NOT NULL,
    at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    actor VARCHAR(64) NOT NULL,
    actor_name VARCHAR(96) NOT NULL,
    "user" VARCHAR(96),
    action VARCHAR(16) NOT NULL,
    subject VARCHAR(96) NOT NULL,
    subject_id VARCHAR(64),
    number SERIAL NOT NULL,
    CONSTRAINT pk_access_events PRIMARY KEY (number)
);
CREATE INDEX ix_access_events_tenant ON access_events (tenant, number);
CREATE TABLE adapter_events (
    tenant VARCHAR(96) NOT NULL,
    adapter VARCHAR(96) NOT NULL,
    at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    actor VARCHAR(64) NOT NULL,
    actor_name VARCHAR(96) NOT NULL,
    "user" VARCHAR(96),
    action VARCHAR(16) NOT NULL,
    version INTEGER,
    main_before INTEGER,
    main_after INTEGER,
    tag VARCHAR(96),
    reason TEXT NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_adapter_events PRIMARY KEY (number)
);
CREATE INDEX ix_adapter_events_adapter ON adapter_events (tenant, adapter, number);
CREATE INDEX ix_adapter_events_tenant ON adapter_events (tenant, number);
CREATE TABLE adapters (
    tenant VARCHAR(96) NOT NULL,
    name VARCHAR(96) NOT NULL,
    "user" VARCHAR(96) NOT NULL,
    versions INTEGER NOT NULL,
    main_version INTEGER,
    rule TEXT,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    deleted_at TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_adapters PRIMARY KEY (number),
    CONSTRAINT uq_adapters_tenant UNIQUE (tenant, name)
);
CREATE INDEX ix_adapters_deleted ON adapters (deleted_at) WHERE deleted_at IS NOT NULL;
CREATE INDEX ix_adapters_tenant ON adapters (tenant, number, deleted_at);
CREATE TABLE approval_rules (
    tenant VARCHAR(96) NOT NULL,
    rule TEXT NOT NULL,
    CONSTRAINT pk_approval_rules PRIMARY KEY (tenant)
);
CREATE TABLE bases (
    name VARCHAR(200) NOT NULL,
    source VARCHAR(4096) NOT NULL,
    hub_id VARCHAR(200),
    sha256 VARCHAR(64) NOT NULL,
    shape TEXT NOT NULL,
    parameters BIGINT NOT NULL,
    tokenizer_sha256 VARCHAR(64) NOT NULL,
    chat_template TEXT,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_bases PRIMARY KEY (number),
    CONSTRAINT uq_bases_name UNIQUE (name)
);
CREATE TABLE cohorts (
    tenant VARCHAR(96) NOT NULL,
    name VARCHAR(96) NOT NULL,
    settings TEXT NOT NULL,
    task TEXT NOT NULL,
    recipe TEXT NOT NULL,
    recipe_id VARCHAR(64) NOT NULL,
    shape TEXT NOT NULL,
    a_sha256 VARCHAR(64) NOT NULL,
    size_d BIGINT NOT NULL,
    rounds INTEGER NOT NULL,
    opens BOOLEAN NOT NULL,
    busy BOOLEAN NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_cohorts PRIMARY KEY (number),
    CONSTRAINT uq_cohorts_tenant UNIQUE (tenant, name)
);
CREATE INDEX ix_cohorts_next ON cohorts (number) WHERE opens AND NOT busy;
CREATE INDEX ix_cohorts_tenant ON cohorts (tenant, number);
CREATE TABLE collections (
    number INTEGER NOT NULL,
    started_at TIMESTAMP WITHOUT TIME ZONE,
    ended_at TIMESTAMP WITHOUT TIME ZONE,
    deleted BIGINT NOT NULL,
    freed_bytes BIGINT NOT NULL,
    CONSTRAINT pk_collections PRIMARY KEY (number)
);
CREATE TABLE devices (
    id VARCHAR(64) NOT NULL,
    tenant VARCHAR(96) NOT NULL,
    name VARCHAR(96) NOT NULL,
    public_key VARCHAR(100) NOT NULL,
    platform VARCHAR(200) NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    last_seen_at TIMESTAMP WITHOUT TIME ZONE,
    revoked_at TIMESTAMP WITHOUT TIME ZONE,
    labels TEXT DEFAULT '{}' NOT NULL,
    report TEXT,
    failures INTEGER DEFAULT '0' NOT NULL,
    cooldown_until TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_devices PRIMARY KEY (number),
    CONSTRAINT uq_devices_id UNIQUE (id)
);
CREATE INDEX ix_devices_tenant ON devices (tenant, number);
CREATE TABLE kept_answers (
    id VARCHAR(64) NOT NULL,
    fingerprint VARCHAR(64) NOT NULL,
    sealed BYTEA NOT NULL,
    kept_until TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_kept_answers PRIMARY KEY (number),
    CONSTRAINT uq_kept_answers_id UNIQUE (id)
);
CREATE INDEX ix_kept_answers_kept_until ON kept_answers (kept_until);
CREATE TABLE privacy_limits (
    tenant VARCHAR(96) NOT NULL,
    "user" VARCHAR(96) NOT NULL,
    epsilon FLOAT,
    delta FLOAT NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_privacy_limits PRIMARY KEY (number),
    CONSTRAINT uq_privacy_limits_tenant UNIQUE (tenant, "user")
);
CREATE TABLE runners (
    platform VARCHAR(100) NOT NULL,
    signed TEXT NOT NULL,
    added_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_runners PRIMARY KEY (number),
    CONSTRAINT uq_runners_platform UNIQUE (platform)
);
CREATE TABLE server_keys (
    key_id VARCHAR(16) NOT NULL,
    public_key VARCHAR(100) NOT NULL,
    rotation TEXT,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    compromised_at TIMESTAMP WITHOUT TIME ZONE,
    retired_at TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_server_keys PRIMARY KEY (number),
    CONSTRAINT uq_server_keys_key_id UNIQUE (key_id)
);
CREATE TABLE start_tags (
    tenant VARCHAR(96) NOT NULL,
    "user" VARCHAR(96) NOT NULL,
    start_tag INTEGER NOT NULL,
    CONSTRAINT pk_start_tags PRIMARY KEY (tenant, "user")
);
CREATE TABLE task_turns (
    tenant VARCHAR(96) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    turn BIGINT NOT NULL,
    CONSTRAINT pk_task_turns PRIMARY KEY (tenant, kind)
);
CREATE INDEX ix_task_turns_turn ON task_turns (turn);
CREATE TABLE tenants (
    name VARCHAR(96) NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    suspended_at TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_tenants PRIMARY KEY (number),
    CONSTRAINT uq_tenants_name UNIQUE (name)
);
CREATE TABLE worker_hosts (
    name VARCHAR(255) NOT NULL,
    memory_bytes BIGINT NOT NULL,
    limited BOOLEAN NOT NULL,
    seen_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    CONSTRAINT pk_worker_hosts PRIMARY KEY (name)
);
CREATE TABLE workers (
    id VARCHAR(64) NOT NULL,
    pid INTEGER NOT NULL,
    host VARCHAR(255) NOT NULL,
    pid_space VARCHAR(255) NOT NULL,
    started_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    seen_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    peak_rss_bytes BIGINT NOT NULL,
    compiler_peak_rss_bytes BIGINT NOT NULL,
    CONSTRAINT pk_workers PRIMARY KEY (id)
);
CREATE TABLE adapter_grants (
    adapter_number INTEGER NOT NULL,
    device_id VARCHAR(64) NOT NULL,
    granted_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_adapter_grants PRIMARY KEY (number),
    CONSTRAINT fk_adapter_grants_adapter_number FOREIGN KEY(adapter_number) REFERENCES adapters (number) ON DELETE CASCADE,
    CONSTRAINT fk_adapter_grants_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
    CONSTRAINT uq_adapter_grants_adapter_number UNIQUE (adapter_number, device_id)
);
CREATE INDEX ix_adapter_grants_adapter ON adapter_grants (adapter_number, number);
CREATE INDEX ix_adapter_grants_device ON adapter_grants (device_id, adapter_number);
CREATE TABLE calibrations (
    sha256 VARCHAR(64) NOT NULL,
    base_number INTEGER NOT NULL,
    kind VARCHAR(16) NOT NULL,
    task VARCHAR(200) NOT NULL,
    examples BIGINT NOT NULL,
    modules INTEGER NOT NULL,
    width INTEGER NOT NULL,
    size BIGINT NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_calibrations PRIMARY KEY (number),
    CONSTRAINT fk_calibrations_base_number FOREIGN KEY(base_number) REFERENCES bases (number),
    CONSTRAINT uq_calibrations_sha256 UNIQUE (sha256)
);
CREATE TABLE cohort_members (
    cohort_number INTEGER NOT NULL,
    "user" VARCHAR(96) NOT NULL,
    device_id VARCHAR(64) NOT NULL,
    joined_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    left_at TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_cohort_members PRIMARY KEY (number),
    CONSTRAINT fk_cohort_members_cohort_number FOREIGN KEY(cohort_number) REFERENCES cohorts (number),
    CONSTRAINT fk_cohort_members_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
    CONSTRAINT uq_cohort_members_cohort_number UNIQUE (cohort_number, "user")
);
CREATE INDEX ix_cohort_members_cohort ON cohort_members (cohort_number, number);
CREATE UNIQUE INDEX ix_cohort_members_device ON cohort_members (cohort_number, device_id) WHERE left_at IS NULL;
CREATE INDEX ix_cohort_members_of_device ON cohort_members (device_id, cohort_number);
CREATE TABLE cohort_rounds (
    id VARCHAR(64) NOT NULL,
    cohort_number INTEGER NOT NULL,
    position INTEGER NOT NULL,
    state VARCHAR(16) NOT NULL,
    why TEXT NOT NULL,
    start TEXT,
    start_sha256 VARCHAR(64),
    version INTEGER,
    members INTEGER NOT NULL,
    updates INTEGER NOT NULL,
    optimizer_sha256 VARCHAR(64),
    opened_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    deadline TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    ended_at TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_cohort_rounds PRIMARY KEY (number),
    CONSTRAINT fk_cohort_rounds_cohort_number FOREIGN KEY(cohort_number) REFERENCES cohorts (number),
    CONSTRAINT uq_cohort_rounds_cohort_number UNIQUE (cohort_number, position),
    CONSTRAINT uq_cohort_rounds_id UNIQUE (id)
);
CREATE INDEX ix_cohort_rounds_cohort ON cohort_rounds (cohort_number, number);
CREATE UNIQUE INDEX ix_cohort_rounds_open ON cohort_rounds (cohort_number) WHERE state = 'open';
CREATE INDEX ix_cohort_rounds_optimizer_sha256 ON cohort_rounds (optimizer_sha256);
CREATE INDEX ix_cohort_rounds_start_sha256 ON cohort_rounds (start_sha256);
CREATE INDEX ix_cohort_rounds_state ON cohort_rounds (state, number) WHERE state IN ('open', 'aggregating');
CREATE TABLE device_nonces (
    device_id VARCHAR(64) NOT NULL,
    nonce VARCHAR(64) NOT NULL,
    expires_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    CONSTRAINT pk_device_nonces PRIMARY KEY (device_id, nonce),
    CONSTRAINT fk_device_nonces_device_id FOREIGN KEY(device_id) REFERENCES devices (id)
);
CREATE TABLE device_requests (
    device_code_digest VARCHAR(64) NOT NULL,
    user_code VARCHAR(16) NOT NULL,
    client_id VARCHAR(100) NOT NULL,
    name VARCHAR(96) NOT NULL,
    public_key VARCHAR(100) NOT NULL,
    platform VARCHAR(200) NOT NULL,
    address VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    interval_seconds INTEGER NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    polled_at TIMESTAMP WITHOUT TIME ZONE,
    tenant VARCHAR(96),
    decided_by VARCHAR(64),
    decided_at TIMESTAMP WITHOUT TIME ZONE,
    device_id VARCHAR(64),
    users TEXT DEFAULT '[]' NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_device_requests PRIMARY KEY (number),
    CONSTRAINT fk_device_requests_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
    CONSTRAINT uq_device_requests_device_code_digest UNIQUE (device_code_digest),
    CONSTRAINT uq_device_requests_user_code UNIQUE (user_code)
);
CREATE INDEX ix_device_requests_address ON device_requests (address);
CREATE INDEX ix_device_requests_expires_at ON device_requests (expires_at);
CREATE TABLE login_requests (
    user_code_digest VARCHAR(64) NOT NULL,
    scopes TEXT NOT NULL,
    device_code_digest VARCHAR(64) NOT NULL,
    client_id VARCHAR(100) NOT NULL,
    name VARCHAR(96) NOT NULL,
    address VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    interval_seconds INTEGER NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    polled_at TIMESTAMP WITHOUT TIME ZONE,
    tenant VARCHAR(96),
    decided_by VARCHAR(64),
    decided_at TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_login_requests PRIMARY KEY (number),
    CONSTRAINT uq_login_requests_device_code_digest UNIQUE (device_code_digest),
    CONSTRAINT uq_login_requests_user_code_digest UNIQUE (user_code_digest)
);
CREATE INDEX ix_login_requests_address ON login_requests (address);
CREATE INDEX ix_login_requests_expires_at ON login_requests (expires_at);
CREATE TABLE device_users (
    device_id VARCHAR(64) NOT NULL,
    "user" VARCHAR(96) NOT NULL,
    bound_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    CONSTRAINT pk_device_users PRIMARY KEY (device_id, "user"),
    CONSTRAINT fk_device_users_device_id FOREIGN KEY(device_id) REFERENCES devices (id)
);
CREATE INDEX ix_device_users_user ON device_users ("user", device_id);
CREATE TABLE enrollments (
    digest VARCHAR(64) NOT NULL,
    tenant VARCHAR(96) NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    used_at TIMESTAMP WITHOUT TIME ZONE,
    device_id VARCHAR(64),
    users TEXT DEFAULT '[]' NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_enrollments PRIMARY KEY (number),
    CONSTRAINT fk_enrollments_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
    CONSTRAINT uq_enrollments_digest UNIQUE (digest)
);
CREATE TABLE programs (
    recipe_id VARCHAR(64) NOT NULL,
    recipe TEXT NOT NULL,
    base_number INTEGER NOT NULL,
    state VARCHAR(16) NOT NULL,
    signed TEXT,
    error TEXT,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    started_at TIMESTAMP WITHOUT TIME ZONE,
    ready_at TIMESTAMP WITHOUT TIME ZONE,
    progress TEXT,
    recompiling BOOLEAN DEFAULT false NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_programs PRIMARY KEY (number),
    CONSTRAINT fk_programs_base_number FOREIGN KEY(base_number) REFERENCES bases (number),
    CONSTRAINT uq_programs_recipe_id UNIQUE (recipe_id)
);
CREATE INDEX ix_programs_state ON programs (state);
CREATE TABLE tasks (
    kind VARCHAR(32) NOT NULL,
    subject VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    memory_bytes BIGINT NOT NULL,
    attempts INTEGER NOT NULL,
    not_before TIMESTAMP WITHOUT TIME ZONE,
    worker_id VARCHAR(64),
    lease_expires_at TIMESTAMP WITHOUT TIME ZONE,
    error TEXT,
    number SERIAL NOT NULL,
    CONSTRAINT pk_tasks PRIMARY KEY (number),
    CONSTRAINT fk_tasks_worker_id FOREIGN KEY(worker_id) REFERENCES workers (id),
    CONSTRAINT uq_tasks_kind UNIQUE (kind, subject)
);
CREATE INDEX ix_tasks_state ON tasks (state, number);
CREATE INDEX ix_tasks_worker_id ON tasks (worker_id);
CREATE TABLE users (
    id VARCHAR(64) NOT NULL,
    tenant VARCHAR(96) NOT NULL,
    name VARCHAR(96) NOT NULL,
    role VARCHAR(16) NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    disabled_at TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_users PRIMARY KEY (number),
    CONSTRAINT fk_users_tenant FOREIGN KEY(tenant) REFERENCES tenants (name),
    CONSTRAINT uq_users_id UNIQUE (id),
    CONSTRAINT uq_users_tenant UNIQUE (tenant, name)
);
CREATE TABLE jobs (
    id VARCHAR(64) NOT NULL,
    tenant VARCHAR(96) NOT NULL,
    state VARCHAR(16) NOT NULL,
    request TEXT NOT NULL,
    task TEXT NOT NULL,
    recipe TEXT NOT NULL,
    recipe_id VARCHAR(64) NOT NULL,
    estimator_reason TEXT,
    adapter VARCHAR(96) NOT NULL,
    "user" VARCHAR(96) NOT NULL,
    dataset VARCHAR(96) NOT NULL,
    priority INTEGER DEFAULT '0' NOT NULL,
    start TEXT,
    start_user VARCHAR(96),
    round TEXT,
    hides_figures BOOLEAN DEFAULT false NOT NULL,
    only_device_id VARCHAR(64),
    device_id VARCHAR(64),
    start_tag INTEGER DEFAULT '0' NOT NULL,
    lane_number INTEGER,
    attempts INTEGER NOT NULL,
    events INTEGER NOT NULL,
    purged BOOLEAN DEFAULT false NOT NULL,
    progress TEXT,
    result TEXT,
    adapter_version INTEGER,
    error TEXT,
    times TEXT NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    updated_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_jobs PRIMARY KEY (number),
    CONSTRAINT fk_jobs_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
    CONSTRAINT fk_jobs_only_device_id FOREIGN KEY(only_device_id) REFERENCES devices (id),
    CONSTRAINT fk_jobs_recipe_id FOREIGN KEY(recipe_id) REFERENCES programs (recipe_id),
    CONSTRAINT uq_jobs_id UNIQUE (id)
);
CREATE INDEX ix_jobs_adapter ON jobs (tenant, adapter, number, state, "user");
CREATE INDEX ix_jobs_ended ON jobs (updated_at, number) WHERE NOT purged AND state IN ('succeeded', 'failed', 'cancelled');
CREATE INDEX ix_jobs_lane ON jobs (lane_number, start_tag, number);
CREATE INDEX ix_jobs_queued ON jobs (tenant, priority DESC, number, recipe_id) WHERE state = 'queued';
CREATE INDEX ix_jobs_recipe ON jobs (recipe_id, state, tenant, number);
CREATE INDEX ix_jobs_state ON jobs (tenant, state, number, "user", adapter, recipe_id);
CREATE INDEX ix_jobs_tenant ON jobs (tenant, number);
CREATE INDEX ix_jobs_user ON jobs (tenant, "user", number, state, adapter);
CREATE TABLE lanes (
    key VARCHAR(64) NOT NULL,
    tenant VARCHAR(96) NOT NULL,
    "user" VARCHAR(96) NOT NULL,
    dataset VARCHAR(96) NOT NULL,
    only_device_id VARCHAR(64),
    recipe_id VARCHAR(64) NOT NULL,
    priority INTEGER NOT NULL,
    needs TEXT NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_lanes PRIMARY KEY (number),
    CONSTRAINT fk_lanes_only_device_id FOREIGN KEY(only_device_id) REFERENCES devices (id),
    CONSTRAINT fk_lanes_recipe_id FOREIGN KEY(recipe_id) REFERENCES programs (recipe_id),
    CONSTRAINT uq_lanes_key UNIQUE (key)
);
CREATE INDEX ix_lanes_user ON lanes (tenant, "user", dataset, only_device_id);
CREATE TABLE masked_rounds (
    round_number INTEGER NOT NULL,
    parameters TEXT NOT NULL,
    phase_seconds FLOAT NOT NULL,
    least INTEGER NOT NULL,
    phase VARCHAR(16) NOT NULL,
    closes_at TIMESTAMP WITHOUT TIME ZONE,
    why TEXT,
    roster TEXT,
    CONSTRAINT pk_masked_rounds PRIMARY KEY (round_number),
    CONSTRAINT fk_masked_rounds_round_number FOREIGN KEY(round_number) REFERENCES cohort_rounds (number)
);
CREATE INDEX ix_masked_rounds_closes_at ON masked_rounds (closes_at);
CREATE TABLE program_files (
    recipe_id VARCHAR(64) NOT NULL,
    version INTEGER NOT NULL,
    role VARCHAR(16) NOT NULL,
    name VARCHAR(100) NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    CONSTRAINT pk_program_files PRIMARY KEY (recipe_id, version, role),
    CONSTRAINT fk_program_files_recipe_id FOREIGN KEY(recipe_id) REFERENCES programs (recipe_id)
);
CREATE INDEX ix_program_files_sha256 ON program_files (sha256);
CREATE TABLE task_requests (
    task_number INTEGER NOT NULL,
    requester VARCHAR(96) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    tenant VARCHAR(96) NOT NULL,
    priority INTEGER NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_task_requests PRIMARY KEY (number),
    CONSTRAINT fk_task_requests_task_number FOREIGN KEY(task_number) REFERENCES tasks (number) ON DELETE CASCADE,
    CONSTRAINT uq_task_requests_requester UNIQUE (requester)
);
CREATE INDEX ix_task_requests_order ON task_requests (tenant, kind, priority DESC, number, task_number);
CREATE INDEX ix_task_requests_task_number ON task_requests (task_number);
CREATE TABLE tokens (
    id VARCHAR(64) NOT NULL,
    digest VARCHAR(64) NOT NULL,
    role VARCHAR(16) NOT NULL,
    tenant VARCHAR(96) NOT NULL,
    name VARCHAR(96) NOT NULL,
    scopes TEXT NOT NULL,
    device_id VARCHAR(64),
    user_id VARCHAR(64),
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITHOUT TIME ZONE,
    last_used_at TIMESTAMP WITHOUT TIME ZONE,
    revoked_at TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_tokens PRIMARY KEY (number),
    CONSTRAINT fk_tokens_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
    CONSTRAINT fk_tokens_tenant FOREIGN KEY(tenant) REFERENCES tenants (name),
    CONSTRAINT fk_tokens_user_id FOREIGN KEY(user_id) REFERENCES users (id),
    CONSTRAINT uq_tokens_digest UNIQUE (digest),
    CONSTRAINT uq_tokens_id UNIQUE (id)
);
CREATE INDEX ix_tokens_tenant ON tokens (tenant, number, role);
CREATE TABLE sessions (
    digest VARCHAR(64) NOT NULL,
    token_id VARCHAR(64) NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_sessions PRIMARY KEY (number),
    CONSTRAINT fk_sessions_token_id FOREIGN KEY(token_id) REFERENCES tokens (id),
    CONSTRAINT uq_sessions_digest UNIQUE (digest)
);
CREATE INDEX ix_sessions_expires_at ON sessions (expires_at);
CREATE TABLE adapter_versions (
    adapter_number INTEGER NOT NULL,
    version INTEGER NOT NULL,
    job_id VARCHAR(64),
    device_id VARCHAR(64),
    recipe TEXT NOT NULL,
    shape TEXT NOT NULL,
    recipe_id VARCHAR(64) NOT NULL,
    a_sha256 VARCHAR(64) NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    size BIGINT NOT NULL,
    size_d BIGINT NOT NULL,
    result TEXT NOT NULL,
    verified BOOLEAN DEFAULT false NOT NULL,
    from_trajectory BOOLEAN DEFAULT false NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    manifest TEXT,
    revision VARCHAR(40),
    key_id VARCHAR(16),
    signature VARCHAR(100),
    kept_state VARCHAR(16) DEFAULT 'approved' NOT NULL,
    message TEXT DEFAULT '' NOT NULL,
    deleted_at TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_adapter_versions PRIMARY KEY (number),
    CONSTRAINT fk_adapter_versions_adapter_number FOREIGN KEY(adapter_number) REFERENCES adapters (number),
    CONSTRAINT fk_adapter_versions_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
    CONSTRAINT fk_adapter_versions_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
    CONSTRAINT uq_adapter_versions_adapter_number UNIQUE (adapter_number, version),
    CONSTRAINT uq_adapter_versions_job_id UNIQUE (job_id)
);
CREATE INDEX ix_adapter_versions_deleted ON adapter_versions (deleted_at) WHERE deleted_at IS NOT NULL;
CREATE INDEX ix_adapter_versions_device ON adapter_versions (device_id, adapter_number);
CREATE INDEX ix_adapter_versions_held ON adapter_versions (adapter_number, number) WHERE kept_state = 'held' AND deleted_at IS NULL;
CREATE INDEX ix_adapter_versions_key_id ON adapter_versions (key_id);
CREATE INDEX ix_adapter_versions_revision ON adapter_versions (adapter_number, revision);
CREATE INDEX ix_adapter_versions_sha256 ON adapter_versions (sha256);
CREATE INDEX ix_adapter_versions_state ON adapter_versions (adapter_number, number, kept_state, deleted_at);
CREATE TABLE cohort_updates (
    round_number INTEGER NOT NULL,
    member_number INTEGER NOT NULL,
    job_number INTEGER,
    state VARCHAR(16) NOT NULL,
    start_version INTEGER,
    start_sha256 VARCHAR(64),
    sha256 VARCHAR(64),
    sent_bytes BIGINT,
    claimed_examples BIGINT,
    examples BIGINT,
    norm FLOAT,
    staleness INTEGER,
    start_accuracy FLOAT,
    tuned_accuracy FLOAT,
    updated_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_cohort_updates PRIMARY KEY (number),
    CONSTRAINT fk_cohort_updates_job_number FOREIGN KEY(job_number) REFERENCES jobs (number),
    CONSTRAINT fk_cohort_updates_member_number FOREIGN KEY(member_number) REFERENCES cohort_members (number),
    CONSTRAINT fk_cohort_updates_round_number FOREIGN KEY(round_number) REFERENCES cohort_rounds (number),
    CONSTRAINT uq_cohort_updates_job_number UNIQUE (job_number),
    CONSTRAINT uq_cohort_updates_round_number UNIQUE (round_number, member_number)
);
CREATE INDEX ix_cohort_updates_member_number ON cohort_updates (member_number);
CREATE INDEX ix_cohort_updates_round ON cohort_updates (round_number, state, number);
CREATE INDEX ix_cohort_updates_sha256 ON cohort_updates (sha256);
CREATE INDEX ix_cohort_updates_start_sha256 ON cohort_updates (start_sha256);
CREATE TABLE declines (
    device_id VARCHAR(64) NOT NULL,
    recipe_id VARCHAR(64) NOT NULL,
    job_number INTEGER NOT NULL,
    needed_bytes BIGINT NOT NULL,
    available_bytes BIGINT NOT NULL,
    enough_bytes BIGINT NOT NULL,
    declined_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    CONSTRAINT pk_declines PRIMARY KEY (device_id, recipe_id),
    CONSTRAINT fk_declines_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
    CONSTRAINT fk_declines_job_number FOREIGN KEY(job_number) REFERENCES jobs (number),
    CONSTRAINT fk_declines_recipe_id FOREIGN KEY(recipe_id) REFERENCES programs (recipe_id)
);
CREATE TABLE job_events (
    job_number INTEGER NOT NULL,
    position INTEGER NOT NULL,
    kind VARCHAR(16) NOT NULL,
    data TEXT NOT NULL,
    CONSTRAINT pk_job_events PRIMARY KEY (job_number, position),
    CONSTRAINT fk_job_events_job_number FOREIGN KEY(job_number) REFERENCES jobs (number)
);
CREATE TABLE leases (
    id VARCHAR(64) NOT NULL,
    job_number INTEGER NOT NULL,
    device_id VARCHAR(64) NOT NULL,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    ended_at TIMESTAMP WITHOUT TIME ZONE,
    ending VARCHAR(16),
    upload_sha256 VARCHAR(64),
    upload_size BIGINT,
    upload_norm FLOAT,
    trajectory_sha256 VARCHAR(64),
    trajectory_size BIGINT,
    memory_bytes BIGINT,
    seconds FLOAT,
    number SERIAL NOT NULL,
    CONSTRAINT pk_leases PRIMARY KEY (number),
    CONSTRAINT fk_leases_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
    CONSTRAINT fk_leases_job_number FOREIGN KEY(job_number) REFERENCES jobs (number),
    CONSTRAINT uq_leases_id UNIQUE (id)
);
CREATE INDEX ix_leases_device ON leases (device_id, ending, number, job_number);
CREATE INDEX ix_leases_expiry ON leases (expires_at, number, job_number, ending) WHERE ending IS NULL;
CREATE INDEX ix_leases_job ON leases (job_number, number);
CREATE UNIQUE INDEX ix_leases_live ON leases (job_number) WHERE ending IS NULL;
CREATE INDEX ix_leases_trajectory_sha256 ON leases (trajectory_sha256);
CREATE INDEX ix_leases_upload_sha256 ON leases (upload_sha256);
CREATE TABLE masked_members (
    round_number INTEGER NOT NULL,
    member VARCHAR(64) NOT NULL,
    job_number INTEGER NOT NULL,
    roster_number INTEGER,
    last_phase VARCHAR(16) NOT NULL,
    advertisement TEXT NOT NULL,
    sealed BYTEA,
    commitment BYTEA,
    vector_sha256 VARCHAR(64),
    signature BYTEA,
    seeds BYTEA,
    keys BYTEA,
    number SERIAL NOT NULL,
    CONSTRAINT pk_masked_members PRIMARY KEY (number),
    CONSTRAINT fk_masked_members_job_number FOREIGN KEY(job_number) REFERENCES jobs (number),
    CONSTRAINT fk_masked_members_member FOREIGN KEY(member) REFERENCES devices (id),
    CONSTRAINT fk_masked_members_round_number FOREIGN KEY(round_number) REFERENCES masked_rounds (round_number)
);
CREATE INDEX ix_masked_members_job_number ON masked_members (job_number);
CREATE UNIQUE INDEX ix_masked_members_round ON masked_members (round_number, member);
CREATE INDEX ix_masked_members_vector_sha256 ON masked_members (vector_sha256);
CREATE TABLE privacy_spendings (
    tenant VARCHAR(96) NOT NULL,
    "user" VARCHAR(96) NOT NULL,
    cohort VARCHAR(96),
    job_id VARCHAR(64) NOT NULL,
    dataset VARCHAR(96) NOT NULL,
    device_id VARCHAR(64),
    sampling_rate FLOAT NOT NULL,
    noise_multiplier FLOAT NOT NULL,
    steps INTEGER NOT NULL,
    spent_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_privacy_spendings PRIMARY KEY (number),
    CONSTRAINT fk_privacy_spendings_device_id FOREIGN KEY(device_id) REFERENCES devices (id),
    CONSTRAINT fk_privacy_spendings_job_id FOREIGN KEY(job_id) REFERENCES jobs (id),
    CONSTRAINT uq_privacy_spendings_job_id UNIQUE (job_id, device_id)
);
CREATE INDEX ix_privacy_spendings_cohort ON privacy_spendings (tenant, cohort, "user");
CREATE INDEX ix_privacy_spendings_dataset ON privacy_spendings (device_id, dataset, "user", sampling_rate, noise_multiplier, steps);
CREATE INDEX ix_privacy_spendings_user ON privacy_spendings (tenant, "user", number);
CREATE TABLE adapter_tags (
    adapter_number INTEGER NOT NULL,
    name VARCHAR(96) NOT NULL,
    version_number INTEGER NOT NULL,
    moved_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    number SERIAL NOT NULL,
    CONSTRAINT pk_adapter_tags PRIMARY KEY (number),
    CONSTRAINT fk_adapter_tags_adapter_number FOREIGN KEY(adapter_number) REFERENCES adapters (number) ON DELETE CASCADE,
    CONSTRAINT fk_adapter_tags_version_number FOREIGN KEY(version_number) REFERENCES adapter_versions (number) ON DELETE CASCADE,
    CONSTRAINT uq_adapter_tags_adapter_number UNIQUE (adapter_number, name)
);
CREATE INDEX ix_adapter_tags_version_number ON adapter_tags (version_number);
CREATE TABLE conversions (
    id VARCHAR(64) NOT NULL,
    version_number INTEGER NOT NULL,
    form VARCHAR(16) NOT NULL,
    state VARCHAR(16) NOT NULL,
    error TEXT,
    created_at TIMESTAMP WITHOUT TIME ZONE NOT NULL,
    started_at TIMESTAMP WITHOUT TIME ZONE,
    ready_at TIMESTAMP WITHOUT TIME ZONE,
    number SERIAL NOT NULL,
    CONSTRAINT pk_conversions PRIMARY KEY (number),
    CONSTRAINT fk_conversions_version_number FOREIGN KEY(version_number) REFERENCES adapter_versions (number) ON DELETE CASCADE,
    CONSTRAINT uq_conversions_id UNIQUE (id),
    CONSTRAINT uq_conversions_version_number UNIQUE (version_number, form)
);
CREATE INDEX ix_conversions_state ON conversions (state);
CREATE TABLE peft_files (
    version_number INTEGER NOT NULL,
    path VARCHAR(100) NOT NULL,
    size BIGINT NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    CONSTRAINT pk_peft_files PRIMARY KEY (version_number, path),
    CONSTRAINT fk_peft_files_version_number FOREIGN KEY(version_number) REFERENCES adapter_versions (number)
);
CREATE INDEX ix_peft_files_sha256 ON peft_files (sha256);
CREATE TABLE trajectories (
    version_number INTEGER NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    size BIGINT NOT NULL,
    steps INTEGER NOT NULL,
    start_sha256 VARCHAR(64),
    head BYTEA NOT NULL,
    CONSTRAINT pk_trajectories PRIMARY KEY (version_number),
    CONSTRAINT fk_trajectories_version_number FOREIGN KEY(version_number) REFERENCES adapter_versions (number) ON DELETE CASCADE
);
CREATE INDEX ix_trajectories_sha256 ON trajectories (sha256);
CREATE TABLE conversion_files (
    conversion_number INTEGER NOT NULL,
    path VARCHAR(100) NOT NULL,
    size BIGINT NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    CONSTRAINT pk_conversion_files PRIMARY KEY (conversion_number, path),
    CONSTRAINT fk_conversion_files_conversion_number FOREIGN KEY(conversion_number) REFERENCES conversions (number) ON DELETE CASCADE
);
CREATE INDEX ix_conversion_files_sha256 ON conversion_files (sha256);
CREATE TABLE trajectory_steps (
    version_number INTEGER NOT NULL,
    step INTEGER NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    head BYTEA NOT NULL,
    CONSTRAINT pk_trajectory_steps PRIMARY KEY (version_number, step),
    CONSTRAINT fk_trajectory_steps_version_number FOREIGN KEY(version_number) REFERENCES trajectories (version_number) ON DELETE CASCADE
);
INSERT INTO collections (number, deleted, freed_bytes) VALUES (1, 0, 0);
INSERT INTO tenants (name, created_at) VALUES ('default', '2026-01-01 00:00:00');
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO alembic_version (version_num) VALUES ('0001');
